"""A run's `config.yaml`: only what was given is a setting, and its source survives every resume."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.file.paths import absolute_paths
from lmcore.config.file.run_file import write_run_file
from lmcore.config.load import load_config
from lmcore.config.plan import ResumePoint, RunPlan
from lmcore.config.resolve import resolve
from lmcore.config.rules.needs import note_without_effect
from lmcore.config.section import run_options
from lmcore.config.settings import Provenance
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate


def plan_of(
    *argv: str, world_size: int = 1, vocab_size: int = 257, resume: ResumePoint | None = None
) -> RunPlan:
    valid = validate(load_config(argv), world_size=world_size)
    return resolve(valid, tokenizer=TokenizerIdentity(vocab_size), resume=resume)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[RunPlan], str]:
    """Write the file of a run to `run/config.yaml` below the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "a.idx", "a.meta.json"):
        Path(name).touch()
    Path("run").mkdir()

    def write_plan(plan: RunPlan) -> str:
        Path("run/config.yaml").write_text(write_run_file(plan), encoding="utf-8")
        return "run/config.yaml"

    return write_plan


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--preset gpt2-124m --train-samples 1000",
        "--train-iters 7 --lr-warmup-iters 3 --no-save-optim --ops attention=x,y layer_norm=z",
        "--name no --sample-prompt=#_é:\n\t\"'\\x --split 1/1/1 --lr 0.1 --lr-warmup-fraction 0",
    ],
)
def test_written_file_reads_back(write, line: str) -> None:
    """`config.yaml` of a run loads to the same settings and the same plan, with their sources."""
    argv = line.split(" ") if line else []
    plan = plan_of(*argv, world_size=2, vocab_size=300)
    again = plan_of(write(plan), world_size=2, vocab_size=300)
    assert again.config == plan.config
    assert again.derived == plan.derived
    assert again.fingerprint == plan.fingerprint
    for name in run_options():
        assert again.provenance[name].source == plan.provenance[name].source
        given = plan.provenance[name].kind not in {"default", "derived"}
        assert (again.provenance[name].kind == "file") is given


def test_derived_values_follow_the_flags(write) -> None:
    """Flags beside a run's file change what is derived from them."""
    path = write(plan_of("--num-layers", "2", "--hidden-size", "64"))
    plan = plan_of(path, "--hidden-size", "512", "--seq-length", "256", "--micro-batch-size", "16")
    assert plan.config.model.ffn_hidden_size == 2048
    assert plan.config.model.max_position_embeddings == 256
    assert plan.global_batch_size == 16
    assert plan.config.model.num_layers == 2


def test_written_file_names_the_sources(write) -> None:
    """Every line says where its value comes from; defaults and derived values are comments."""
    text = Path(write(plan_of("--lr", "2e-3", "--preset", "gpt2-124m", vocab_size=50257)))
    lines = {line.split(":")[0].strip(): line for line in text.read_text().splitlines()}
    assert lines["lr"].endswith("# --lr")
    assert lines["num_layers"].endswith("# preset: gpt2-124m")
    assert lines["# ffn_hidden_size"].endswith("# derived: 4 * hidden_size")
    assert lines["# seed"].endswith("# default")


def test_sources_survive_resumes(write) -> None:
    """A value keeps its source through three files; an edited value has the file's line instead."""
    Path("user.yaml").write_text("training:\n  seed: 7\n")
    path = write(plan_of("user.yaml", "--lr", "0.1", "--min-lr", "0.01"))
    for _ in range(3):
        plan = plan_of(path)
        assert plan.provenance["lr"].source == "--lr"
        assert plan.provenance["seed"].source == "user.yaml:2"
        assert plan.to_dict()["sources"]["lr"] == "--lr"
        write(plan)
    text = Path(path).read_text()
    assert load_config([path]).shown("lr").startswith("`lr: 0.1` (run/config.yaml:")
    Path(path).write_text(text.replace("lr: 0.1 ", "lr: 0.2 ").replace("# seed: 1234", "seed: 8"))
    loaded = load_config([path])
    line = text[: text.index("\n  lr: 0.1 ")].count("\n") + 2
    assert loaded.value("lr") == 0.2
    assert loaded.provenance["lr"] == Provenance("file", f"run/config.yaml:{line}")
    assert loaded.provenance["min_lr"].source == "--min-lr"


@pytest.mark.parametrize(
    "load, save, again",
    [("a", "b", " --load '{}/a'"), ("a", "a", ""), ("a/checkpoints/iter_0000003", "a", "")],
)
def test_the_command_that_repeats_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: str, save: str, again: str
) -> None:
    """A run that began at another run's checkpoint needs it again, unless it has its own."""
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    text = write_run_file(plan_of("--load", load, "--save", save))
    assert f"NEW_DIR{again.format(Path.cwd())}` repeats it." in text


def test_options_of_one_start_are_comments(write) -> None:
    """A run that was fine-tuned is continued from its file; the file says how to repeat it."""
    path = write(plan_of("--finetune", "--load", "x y", "--save", "run", "--change-tokenizer"))
    loaded = load_config([path, "--load", "run", "--save", "run"])
    assert not loaded.config.checkpoint.finetune
    assert not loaded.config.checkpoint.change_tokenizer
    assert load_config([path]).config.checkpoint.load is None
    text = Path(path).read_text()
    again = f"--load '{Path.cwd()}/x y' --finetune --change-tokenizer` repeats it."
    assert text.splitlines()[0].endswith(again)
    assert re.search(r"# finetune: true +# --finetune; of that start only", text)
    use = write(plan_of("--load", "run", "--use-checkpoint-opt-param-scheduler"))
    assert load_config([use]).config.checkpoint.use_checkpoint_opt_param_scheduler


def test_continued_elsewhere(write, caplog: pytest.LogCaptureFixture) -> None:
    """A run that its own file continues in a new directory gets a warning, with the remedy."""
    path = write(plan_of("--save", "run"))
    load_config([path, "--load", "run", "--save", "run"])
    load_config([path, "--load", "other"])
    load_config([path, "--load", "run", "--finetune"])
    assert caplog.messages == []
    for load in ("run", "run/checkpoints/iter_0000001"):
        caplog.clear()
        load_config([path, "--load", load])
        assert ["`--save run` continues in place" in text for text in caplog.messages] == [True]


def test_paths_work_from_any_directory(write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the file are absolute, in lists with weights and ranges too."""
    path = write(plan_of("--data-path", "1", "a", "--eval-iters", "0"))
    ranges = "train: 1 0:0.5 a"
    plan = plan_of("--train-weighted-split-paths", ranges, "--eval-iters", "0")
    folder = Path.cwd()
    Path("other").mkdir()
    monkeypatch.chdir("other")
    assert plan_of(f"../{path}").config.data.data_path == ("1", f"{folder}/a")
    assert f'["train: 1 0:0.5 {Path.cwd()}/a"]' in write_run_file(plan)


def test_earlier_file(write) -> None:
    """In a file of lmcore 2026.11 all values are settings; the default's are no one's."""
    text = "# The settings of a run; `lmcore train THIS_FILE --save NEW_DIR` repeats it.\n"
    text += "data:\n  data_path: [a]  # --data-path\n  split: 969,30,1  # default\n"
    text += "model:\n  ffn_hidden_size: 256  # derived: 4 * hidden_size\n"
    text += "optimizer:\n  lr_warmup_fraction: null  # default\n  lr_warmup_iters: 0  # default\n"
    Path("run/config.yaml").write_text(text)
    loaded = load_config(["run/config.yaml"])
    assert loaded.config.data.data_path == ("a",)  # relative to the working directory
    assert loaded.provenance["data_path"] == Provenance("file", "run/config.yaml:3", "--data-path")
    assert loaded.provenance["split"] == Provenance("default")
    assert loaded.value("ffn_hidden_size") == 256
    assert plan_of("run/config.yaml").lr_warmup_samples == 0


def test_batch_size_of_the_checkpoint() -> None:
    """A run that resumes keeps the checkpoint's batch size on another number of processes."""
    resume = ResumePoint(Path("x"), None, data_rules={}, global_batch_size=16)
    assert plan_of(resume=resume).num_micro_batches == 2
    assert plan_of(resume=resume, world_size=2).num_micro_batches == 1
    assert plan_of("--global-batch-size", "8", resume=resume).global_batch_size == 8
    with pytest.raises(ConfigError, match="checkpoint's global batch size") as caught:
        plan_of("--micro-batch-size", "32", resume=resume)
    assert "`--global-batch-size 32`" in str(caught.value.hint)


def test_the_file_of_a_moved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It records its directory: data that was moved together with it is found, with a notice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old/run").mkdir(parents=True)
    for name in ("a.bin", "a.idx", "a.meta.json"):
        (tmp_path / "old" / name).touch()
    text = write_run_file(plan_of("--data-path", "old/a"), Path("old/run"))
    (tmp_path / "old/run/config.yaml").write_text(text)
    (tmp_path / "old").rename(tmp_path / "new")
    loaded = load_config(["new/run/config.yaml"])
    assert loaded.config.data.data_path == (str(tmp_path / "new/a"),)
    assert loaded.notices == (
        f"`data_path`: `{tmp_path / 'old/a'}` is gone; `{tmp_path / 'new/a'}` is used",
    )
    edited = text.replace(f"# directory: {tmp_path / 'old/run'}", "# directory: relative")
    assert edited != text
    (tmp_path / "new/run/config.yaml").write_text(edited)
    assert load_config(["new/run/config.yaml"]).config.data.data_path == (str(tmp_path / "old/a"),)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--name trial --save run",
        "--load run --save run --schedule extend --no-load-rng",
        "--load run --finetune --lr-decay-style constant --lr-cooldown-fraction 0.5",
        "--load run --use-checkpoint-opt-param-scheduler",
        "--preset llama-1b --position-embedding-type none --train-samples 64",
        "--data-path a --sample-prompt none --sample-tokens 5 --tensorboard-queue-size 7",
        "--train-data-path 0.5 a --valid-data-path a --eval-iters 0",
        "--no-tensorboard --tensorboard-log-interval 3 --save-interval 5 --keep-last 2",
        "--precision fp16 --initial-loss-scale 64 --hysteresis 3",
        "--rampup-batch-size 2 2 64 --global-batch-size 8 --micro-batch-size 2 --train-samples 640",
        "--sequence-parallel --recompute none --recompute-num-layers 1 --profile-memory",
    ],
)
def test_a_runs_own_file_is_taken_without_complaint(
    write, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    """Settings that a run recorded are no error and not named, even if they had no effect there."""
    plan = plan_of(*line.split(), vocab_size=300)
    path = write(plan)
    caplog.clear()
    repeated = [path, "--save", "new"]
    loaded = load_config(repeated)
    again = plan_of(*repeated, vocab_size=300)
    assert note_without_effect(again) is None
    assert not loaded.notices
    assert not caplog.messages
    for option in run_options().values():
        if not option.one_start:
            assert again.value(option) == absolute_paths(option, plan.value(option)), option.name
