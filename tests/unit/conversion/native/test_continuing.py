"""Notes of a conversion about the run that continues: what is not there, and what it needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_states import GPT2, RandomState

from lmcore.checkpoint import save_checkpoint
from lmcore.cli.main import main
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import WriteOptions
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.native.continuing import continue_notes
from lmcore.conversion.native.manifest import stored_name
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import ADAM, WEIGHT, Progress
from lmcore.data.tokenizer import ByteTokenizer

Change = Callable[[dict[str, Any]], Any]
ABSENT = "the checkpoint has no optimizer state: its weights alone are written"
SCHEDULE = {
    "style": "linear",
    "highest": 1e-3,
    "lowest": 0.0,
    "warmup_samples": 8.0,
    "decay_samples": 800,
}
SETTINGS = {
    "seq_length": 32,
    "global_batch_size": 8,
    "train_iters": 100,
    "lr": 1e-3,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 1,
}


def megatron(directory: Path, change: Change = lambda _content: None) -> Path:
    """Write a checkpoint of step 7 and 56 samples, whose rank file *change* changes."""
    state = RandomState(GPT2, (WEIGHT, *ADAM))
    for name in state.parameters:
        state.tensors[name, "exp_avg_sq"].abs_()
    state.vocab_size, state.settings = 257, SETTINGS
    state.progress = Progress(7, 56, 7, SCHEDULE)
    write_megatron(state, directory, None)
    [path] = directory.rglob("model_optim_rng.pt")
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    return directory


def test_a_run_that_is_written_as_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A note names what is not taken along; precision and the name of the tokenizer are shown."""
    state = RandomState(GPT2, (WEIGHT, *ADAM))
    state.settings, state.progress = SETTINGS | {"precision": "bf16"}, Progress(7, 56, 7, SCHEDULE)
    state.tokenizer_type = "GPT2BPETokenizer"
    write_lmcore(state, tmp_path / "run", None)
    notes = " ".join(convert(tmp_path / "run", tmp_path / "again", "lmcore").notes)
    assert "sample order, random states and `config.yaml` of the run are left out" in notes
    assert main(["checkpoint", "inspect", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "  tokenizer   GPT2BPETokenizer, without its files\n" in printed
    assert "precision bf16" in printed


def test_a_whole_state_needs_nothing(tmp_path: Path) -> None:
    """Step and samples come from the source, for every target."""
    source = megatron(tmp_path / "source")
    for to in ("lmcore", "huggingface", "megatron"):
        done = convert(source, tmp_path / to, to)
        assert (done.step, done.consumed_samples, done.continue_flags) == (7, 56, ())
        assert not any("--continue" in note or note == ABSENT for note in done.notes)
        assert json.loads(json.dumps(done.to_json()))["consumed_samples"] == 56


def test_without_an_optimizer(tmp_path: Path) -> None:
    """A note says so where the format would have it, once."""
    source = megatron(tmp_path / "source", lambda content: content.pop("optimizer"))
    done = convert(source, tmp_path / "run", "lmcore")
    assert done.notes.count(ABSENT) == 1
    assert done.continue_flags == ("--no-load-optim",)
    assert any("needs `--no-load-optim`" in note for note in done.notes)
    assert ABSENT in convert(source, tmp_path / "megatron", "megatron").notes
    assert ABSENT not in convert(source, tmp_path / "model", "huggingface").notes
    again = convert(tmp_path / "run", tmp_path / "again", "lmcore")
    assert ABSENT in again.notes


def test_samples_as_long_as_the_model(tmp_path: Path) -> None:
    """A length that is not recorded fits the positions; the default of 128 exceeds them."""
    for positions, length, said in (
        (32, 32, "defaults (`--seq-length 32`, the model's positions) unless"),
        (256, None, "has the defaults unless"),
    ):
        state = RandomState(replace(GPT2, max_position_embeddings=positions), (WEIGHT, *ADAM))
        [absent] = [note for note in continue_notes(state) if "does not record" in note]
        assert said in absent
        write_lmcore(state, tmp_path / str(positions), None)
        assert LmcoreState(tmp_path / str(positions)).settings.get("seq_length") == length


def test_a_finished_run(tmp_path: Path) -> None:
    """It needs a greater length, in the same unit; another format has nothing to continue."""

    def finish(content: dict[str, Any]) -> None:
        content["args"].train_iters = 7

    def finish_samples(content: dict[str, Any]) -> None:
        content["args"].train_iters, content["args"].train_samples = None, 56

    source = megatron(tmp_path / "source", finish)
    assert convert(source, tmp_path / "run", "lmcore").longer_flag == "--train-iters"
    assert convert(tmp_path / "run", tmp_path / "r", "lmcore").longer_flag == "--train-iters"
    assert convert(source, tmp_path / "hf", "huggingface").longer_flag is None
    source = megatron(tmp_path / "samples", finish_samples)
    assert convert(source, tmp_path / "s", "lmcore").longer_flag == "--train-samples"
    source = megatron(tmp_path / "open")
    assert convert(source, tmp_path / "o", "lmcore").longer_flag is None


def test_a_run_on_its_ramp(tmp_path: Path) -> None:
    """The ramp is a setting of the run, as Megatron writes it; steps that fit decide the end."""

    def ramp(samples: int | None) -> Change:
        def change(content: dict[str, Any]) -> None:
            args = content["args"]
            args.rampup_batch_size, args.global_batch_size = ["4", "4", "900"], 64
            args.train_iters, args.train_samples = 100, samples

        return change

    source = megatron(tmp_path / "source", ramp(60))
    assert convert(source, tmp_path / "run", "lmcore").longer_flag is None, "4 samples are left"
    assert LmcoreState(tmp_path / "run").settings["rampup_batch_size"] == (4, 4, 900)
    convert(tmp_path / "run", tmp_path / "again", "megatron")
    assert convert(tmp_path / "again", tmp_path / "r", "lmcore").longer_flag is None
    source = megatron(tmp_path / "ended", ramp(59))
    assert convert(source, tmp_path / "e", "lmcore").longer_flag == "--train-samples"
    source = megatron(tmp_path / "steps", ramp(None))
    convert(source, tmp_path / "s", "lmcore")
    assert "rampup_batch_size" not in LmcoreState(tmp_path / "s").settings


@pytest.mark.parametrize("value", ["long", -1, {}, [7, 7], True])
@pytest.mark.parametrize("name", ["seq_length", "train_iters"])
def test_a_setting_that_no_option_has(name: str, value: Any, tmp_path: Path) -> None:
    """A run's manifest may be of any author: the value is named and not used."""
    state = RandomState(GPT2)
    run = tmp_path / "run"
    saved = {"model": {}, "training": {**SETTINGS, name: value}}
    meta = {"config": {"config": saved}, "counters": {"iteration": 7, "consumed_samples": 56}}
    tensors = {f"model.{one}": state.read(one) for one in state.parameters}
    save_checkpoint(run / "checkpoints", 7, tensors, meta, model_shape=state.shape.to_dict())
    found = convert(run, tmp_path / "out", "lmcore")
    assert name not in LmcoreState(run).settings
    assert f"not read: the settings `{name}`, which have values of no option" in found.notes


@pytest.mark.parametrize(
    "meta",
    [
        {"schedule": {"style": "linear"}},
        {"schedule": SCHEDULE | {"highest": "high"}},
        {"schedule": SCHEDULE | {"style": "unknown"}},
        {"schedule": SCHEDULE | {"start_samples": "0"}},
        {"schedule": SCHEDULE | {"decay_samples": 10**400}},
        {"loss_scale": {"value": 1.0}},
        {"loss_scale": {"value": "1", "good_steps": 0, "tolerance": 2}},
    ],
)
def test_a_schedule_or_scale_of_no_run(meta: dict[str, Any], tmp_path: Path) -> None:
    """A part of a manifest that no run writes is not read; a conversion leaves it out."""
    state = RandomState(GPT2, (WEIGHT, *ADAM))
    state.progress = Progress(7, 56, 7)
    run = tmp_path / "run"
    tensors = {stored_name(*key): tensor for key, tensor in state.tensors.items()}
    tensors |= {f"optimizer.step.{name}": torch.tensor(7.0) for name in state.parameters}
    meta = {"counters": {"iteration": 7, "consumed_samples": 56}} | meta
    save_checkpoint(run / "checkpoints", 7, tensors, meta, model_shape=state.shape.to_dict())
    options = WriteOptions(dtype=torch.float16)
    found = convert(run, tmp_path / "out", "megatron", options=options, verify=False)
    assert found.optimizer
    progress = LmcoreState(run).progress
    assert progress is not None
    assert (progress.schedule, progress.loss_scale) == (None, None)


def test_a_note_about_the_optimizer_is_not_repeated(tmp_path: Path) -> None:
    """One that was not read has its own note, with the reason."""

    def adopt(content: dict[str, Any]) -> None:
        content["args"].optimizer = "adopt"

    done = convert(megatron(tmp_path / "source", adopt), tmp_path / "run", "lmcore")
    assert ABSENT not in done.notes
    assert done.continue_flags == ("--no-load-optim",)
    done = convert(megatron(tmp_path / "other"), tmp_path / "o", "lmcore", weights_only=True)
    assert ABSENT not in done.notes
    assert done.continue_flags == ("--no-load-optim",)


def test_a_model_has_no_run_to_continue(tmp_path: Path) -> None:
    """A Hugging Face directory has neither step nor optimizer, and needs no note of them."""
    (tmp_path / "model").mkdir()
    write_huggingface(RandomState(GPT2), tmp_path / "model", ByteTokenizer())
    done = convert(tmp_path / "model", tmp_path / "run", "lmcore")
    assert (done.step, done.consumed_samples, done.continue_flags) == (None, None, ())
    assert done.notes == []


def test_samples_that_are_not_recorded(tmp_path: Path) -> None:
    """Versions of Megatron before 3.0 have no number of samples, which is not 0."""

    def older(content: dict[str, Any]) -> None:
        del content["args"].consumed_train_samples

    done = convert(megatron(tmp_path / "source", older), tmp_path / "run", "lmcore")
    assert (done.step, done.consumed_samples) == (7, None)
    uncounted = "the checkpoint does not record how many samples the run consumed: 0 is written"
    assert f"{uncounted}, and a run that continues begins with its first" in done.notes
    assert uncounted in convert(tmp_path / "source", tmp_path / "again", "megatron").notes


@pytest.mark.parametrize(
    "key, flag, what",
    [
        ("opt_param_scheduler", "--override-opt-param-scheduler", "learning-rate schedule"),
        ("optimizer", "--no-load-optim", "optimizer state"),
    ],
)
def test_the_run_continues_with_the_flags(
    key: str, flag: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a flag that the summary's command has, the run stops with the true cause."""
    source = megatron(tmp_path / "source", lambda content: content.pop(key))
    run = str(tmp_path / "run")
    tokenizer = ["--tokenizer-type", "ByteTokenizer"]
    assert main(["checkpoint", "convert", str(source), run, "--to", "lmcore", *tokenizer]) == 0
    printed = capsys.readouterr().out
    assert "  step 7, 56 samples consumed\n" in printed
    assert f"\n      lmcore train --continue {run} {flag} --data-path PREFIX" in printed
    command = ["train", "--continue", run, "--micro-batch-size", "4", "--exit-interval", "8"]
    command += ["--device", "cpu", "--sample-tokens", "0", "--eval-iters", "0"]
    command += ["--corpus", "shakespeare"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"has no {what}" in said
    assert "it was converted from Megatron-LM" in said
    assert "`source`" in said
    assert "--no-save-optim" not in said
    assert main([*command, flag]) == 0
