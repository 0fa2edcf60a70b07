"""`--continue RUN` as a source of settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.continued import ContinuedRun, continue_command
from lmcore.config.file.run_file import write_run_file
from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.section import run_options
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory below the working directory, with a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a/checkpoints/iter_0000007").mkdir(parents=True)
    (tmp_path / "runs/a/config.yaml").write_text(
        "training:\n  train_iters: 8\ncheckpoint:\n  schedule: keep\n  load: elsewhere\n"
        "data:\n  data_path: [text]\n"
    )
    return Path("runs/a")


@pytest.mark.parametrize(
    "path, load",
    [
        ("runs/a", "runs/a"),
        ("runs/a/config.yaml", "runs/a"),
        ("runs/a/checkpoints", "runs/a/checkpoints"),
        ("runs/a/checkpoints/iter_0000007", "runs/a/checkpoints/iter_0000007"),
    ],
)
def test_the_directory_of_a_run(run: Path, path: str, load: str) -> None:
    """Any path of a run names its directory, for a run that continues in place."""
    found = ContinuedRun.at(path)
    assert (found.load, found.directory) == (Path(load), run)
    loaded = load_config(["--continue", path])
    checkpoint = loaded.config.checkpoint
    assert (checkpoint.load, checkpoint.save) == (load, "runs/a")
    assert str(loaded.provenance["load"]) == "--continue"
    assert loaded.config.data.data_path == ("runs/a/text",)


def test_a_directory_of_runs(run: Path) -> None:
    """The newest run inside is suggested; other directories are not."""
    Path("runs/logs").mkdir()
    Path("runs/b/checkpoints").mkdir(parents=True)
    os.utime("runs/b", (1, 1))
    with pytest.raises(ConfigError, match="no run found") as caught:
        ContinuedRun.at("runs")
    assert caught.value.hint == f"did you mean `{run}`?"
    assert str(caught.value.why).endswith("its subdirectories have")
    with pytest.raises(ConfigError) as caught:
        ContinuedRun.at("runs/logs")
    assert "`--save` named" in str(caught.value.hint)


def test_from_within(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may be the run, its checkpoints, or one of them."""
    for inside, path, directory in (
        ("runs/a", ".", "."),
        ("runs/a", "checkpoints/iter_0000007", "."),
        ("runs/a/checkpoints", "iter_0000007", ".."),
    ):
        with monkeypatch.context() as patch:
            patch.chdir(inside)
            assert ContinuedRun.at(path).directory == Path(directory)


def test_flags_and_files_override(run: Path, tmp_path: Path) -> None:
    """Further files and flags are above the run's settings; `--save` may be another directory."""
    (tmp_path / "more.yaml").write_text("training:\n  seed: 7\n")
    config = load_config(["more.yaml", "--continue", "runs/a", "--save", "b"]).config
    assert (config.training.seed, config.training.train_iters) == (7, 8)
    assert (config.checkpoint.load, config.checkpoint.save) == ("runs/a", "b")


def test_a_deepspeed_file_is_read_again(run: Path) -> None:
    """A run with a DeepSpeed file continues with it."""
    (run / "ds.json").write_text('{"gradient_clipping": 0.5}')
    with (run / "config.yaml").open("a") as file:
        file.write("parallel:\n  deepspeed_config: ds.json\n")
    loaded = load_config(["--continue", "runs/a"])
    assert loaded.value("clip_grad") == 0.5


@pytest.mark.parametrize(
    "flags, answer",
    [
        ("", "keep"),
        ("--train-iters 8 --seed 5", "keep"),
        ("--train-iters 9", None),
        ("--lr 0.5", None),
        ("--train-iters 9 --schedule extend", "extend"),
        ("--override-opt-param-scheduler", None),
    ],
)
def test_an_answer_is_for_one_length(run: Path, flags: str, answer: str | None) -> None:
    """The recorded choice of a schedule does not answer for a further change."""
    config = load_config(["--continue", "runs/a", *flags.split()]).config
    assert config.checkpoint.schedule == answer


def test_flags_that_contradict(run: Path) -> None:
    """All of them are one error."""
    with pytest.raises(ConfigError) as caught:
        load_config(["--continue", "runs/a", "--load", "x", "--finetune", "--preset", "gpt2-124m"])
    assert len(caught.value.others) == 2


def test_a_checkpoint_outside_of_a_run(tmp_path: Path) -> None:
    """It has no directory to continue in; the hint takes its settings."""
    (tmp_path / "iter_0000007").mkdir()
    with pytest.raises(ConfigError, match="not in a run directory") as caught:
        ContinuedRun.at(str(tmp_path / "iter_0000007"))
    assert "--use-checkpoint-args" in str(caught.value.hint)


def test_a_misspelt_run(run: Path) -> None:
    """The nearest name is suggested."""
    with pytest.raises(ConfigError, match="no such directory") as caught:
        ContinuedRun.at("run/a")
    with pytest.raises(ConfigError, match="no such directory") as caught:
        ContinuedRun.at("runs/b1")
    (run.parent / "second").mkdir()
    with pytest.raises(ConfigError) as caught:
        ContinuedRun.at("runs/secnd")
    assert "did you mean `runs/second`?" in str(caught.value.hint)


def test_a_file_of_a_run_that_is_cut_off(run: Path) -> None:
    """Defaults in place of what is missing are not the run's settings."""
    valid = validate(load_config(["--train-iters", "9"]))
    text = write_run_file(resolve(valid, tokenizer=TokenizerIdentity(257)), run)
    path = run / "config.yaml"
    for length in (0, 1000, len(text) // 2):
        path.write_text(text[:length])
        with pytest.raises(ConfigError, match="is empty or cut off"):
            load_config(["--continue", "runs/a"])
    path.write_text(text)
    assert load_config(["--continue", "runs/a"]).config.training.train_iters == 9
    plain = write_run_file(
        resolve(validate(load_config([])), tokenizer=TokenizerIdentity(257)), run
    )
    path.write_text(plain)
    assert load_config(["--continue", "runs/a"]).config.checkpoint.load == "runs/a"


@pytest.mark.parametrize(
    "change, what, why",
    [
        (lambda text: "Hello world\n" + text, ":1: not YAML", "`Hello world` is before the first"),
        (lambda text: text.replace("\nmodel:", "\n model:"), "not YAML", "`model:`, is indented"),
        (lambda _text: "hello\n", "does not hold sections", "it begins with `hello`"),
        (lambda _text: "", "is empty or cut off", "it is empty"),
        (lambda _text: "# only\n", "is empty or cut off", "lmcore begins it with `# Settings of"),
        (lambda text: text[text.index("\ntraining:") :], "cut off", "1 of the 2 settings"),
    ],
    ids=["text first", "indented", "text", "empty", "comment", "beginning"],
)
def test_a_broken_file_of_a_run(
    change: Callable[[str], str], what: str, why: str, run: Path
) -> None:
    """The error names the line and what is expected; the checkpoint has the settings, too."""
    argv = ["--num-layers", "2", "--train-iters", "9"]
    plan = resolve(validate(load_config(argv)), tokenizer=TokenizerIdentity(257))
    (run / "config.yaml").write_text(change(write_run_file(plan, run)))
    with pytest.raises(ConfigError) as caught:
        load_config(["--continue", "runs/a"])
    text = caught.value.render()
    assert what in text
    assert why in text
    assert text.endswith("hint: remove it: without it the settings come from the checkpoint")


def test_the_command_is_quoted() -> None:
    """A path with a space is one word of the shell."""
    assert continue_command(Path("a run")) == "lmcore train --continue 'a run'"


def test_settings_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that were set are taken, derived ones and defaults are not, wrong ones are errors."""
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = {
        "model": {"hidden_size": 32, "ffn_hidden_size": 128, "num_layers": "many", "swiglu": False},
        "data": {"data_path": ["0.5", "text"]},
        "optimizer": {"lr": 0.5, "min_lr": 0.25},
        "checkpoint": {"load": "x", "schedule": "keep"},
        "plugins": {"absent": {"threads": 3}},
        "training": [],
    }
    sources = {
        "ffn_hidden_size": "derived: 4 * hidden_size",
        "swiglu": "default",
        "min_lr": "default",  # of another version
        "lr": 7,
    }
    problems: list[Any] = []
    layer = SavedSettings("iter_0000007", config, sources).layer(run_options(), problems)
    assert {name: value for name, (value, _) in layer.items()} == {
        "hidden_size": 32,
        "data_path": ("0.5", str(tmp_path / "text")),
        "lr": 0.5,
        "min_lr": 0.25,
        "schedule": "keep",
    }
    assert [str(origin) for _, origin in layer.values()] == ["checkpoint: iter_0000007"] * 5
    (problem,) = problems
    assert "`num_layers: many`: expected an integer" in problem.what
    names = SavedSettings("x", config, {}).layer(run_options(), [], names={"lr"})
    assert list(names) == ["lr"]


@pytest.mark.parametrize("encoding, rows", [("learned_absolute", 512), ("rope", None)])
def test_positions_of_a_checkpoint(encoding: str, rows: int | None) -> None:
    """A table of learned positions is the checkpoint's, although it was derived from a length.

    Fine-tuning on shorter samples keeps it; rotary positions have no table.
    """
    config = {
        "model": {
            "seq_length": 512,
            "max_position_embeddings": 512,
            "position_embedding_type": encoding,
        }
    }
    sources = {"max_position_embeddings": "derived: seq_length"}
    loaded = load_config(
        ["--load", "run", "--use-checkpoint-args", "--finetune", "--seq-length", "128"],
        saved_settings=lambda _path, _step: SavedSettings("run", config, sources),
    )
    assert loaded.config.model.seq_length == 128
    assert loaded.config.model.max_position_embeddings == rows
