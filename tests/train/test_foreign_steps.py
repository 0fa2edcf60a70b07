"""`--ckpt-step` with directories of Megatron and DeepSpeed, in every command that has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepspeed_plugin import with_deepspeed
from model_states import GPT2, RandomState

from lmcore.cli.main import main
from lmcore.conversion.convert import convert
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import WEIGHT, Progress
from lmcore.data.tokenizer import ByteTokenizer

NAME = "final_norm.bias"
RUN = (
    "--tokenizer-type ByteTokenizer --train-iters 1 --global-batch-size 1 --micro-batch-size 1"
    " --eval-iters 0 --sample-tokens 0 --num-threads 1 --cpu-peak-seconds 0 --device cpu --lr 1e-9"
)


def state_of(step: int) -> RandomState:
    """Return a model in which one vector has the number of the step."""
    state = RandomState(GPT2)
    state.tensors[NAME, WEIGHT] = torch.full((24,), float(step))
    state.vocab_size, state.progress = 257, Progress(step, step * 8)
    return state


def is_of(run: Path, step: int) -> bool:
    return bool((LmcoreState(run).read(NAME).round() == step).all())


@pytest.fixture(autouse=True)
def _deepspeed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Adds the format of its plugin."""
    with with_deepspeed(tmp_path_factory, monkeypatch):
        yield


@pytest.fixture(
    params=["megatron", "megatron-deepspeed", pytest.param("megatron-dist", marks=pytest.mark.full)]
)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a directory with checkpoints of steps 3 and 5."""
    directory = tmp_path / "saved"
    for step in (3, 5):
        write_lmcore(state_of(step), tmp_path / f"run{step}", ByteTokenizer())
        convert(tmp_path / f"run{step}", tmp_path / f"away{step}", request.param)
        shutil.copytree(tmp_path / f"away{step}", directory, dirs_exist_ok=True)
    return directory


def test_each_command(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint of that step is taken; without the option the newest is."""
    load = ["--load", str(saved)]
    checkpoint = ["checkpoint", "convert", str(saved)]
    for flags, step in (([], 5), (["--ckpt-step", "3"], 3)):
        run = tmp_path / f"begun{step}"
        assert main(["train", *load, *flags, *RUN.split(), "--save", str(run)]) == 0
        assert is_of(run, step)
        run = tmp_path / f"converted{step}"
        assert main([*checkpoint, str(run), "--to", "lmcore", *flags]) == 0
        assert is_of(run, step)
        capsys.readouterr()
        inspect = ["--tensors", f"model.{NAME}", "--norms", "--json"]
        assert main(["checkpoint", "inspect", str(saved), *flags, *inspect]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["tensors"][f"model.{NAME}"]["mean"] == step
    generate = ["generate", *load, "--tokenizer-type", "ByteTokenizer", "--prompt", "ab"]
    assert main([*generate, "--tokens", "1", "--ckpt-step", "3", "--device", "cpu"]) == 0
    assert f"loaded {next(saved.glob('*3'))} on" in capsys.readouterr().err


def test_a_step_that_is_not_there(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command lists the steps, and writes nothing."""
    run = str(tmp_path / "run")
    for command in (
        ["train", "--load", str(saved), *RUN.split(), "--save", run],
        ["generate", "--load", str(saved), "--prompt", "ab"],
        ["checkpoint", "inspect", str(saved)],
        ["checkpoint", "convert", str(saved), run, "--to", "lmcore"],
    ):
        assert main([*command, "--ckpt-step", "4"]) == 2
        said = capsys.readouterr().err
        assert "no checkpoint of step 4" in said
        assert "there are checkpoints of steps 3, 5" in said
    assert not (tmp_path / "run").exists()


def test_a_run_of_lmcore_is_converted_at_a_step(tmp_path: Path) -> None:
    """`checkpoint convert` has the option for these too."""
    run = tmp_path / "run"
    for step in (3, 5):
        other = tmp_path / f"run{step}"
        write_lmcore(state_of(step), other, ByteTokenizer())
        shutil.copytree(other, run, dirs_exist_ok=True)
    command = ["checkpoint", "convert", str(run), str(tmp_path / "out"), "--to", "lmcore"]
    assert main([*command, "--ckpt-step", "3"]) == 0
    assert is_of(tmp_path / "out", 3)
