"""The checkpoint of `--load` beside the settings of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcore.base.errors import CheckpointArgumentError
from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.load import load_config
from lmcore.config.plan import ResumePoint
from lmcore.config.section.checkpoint import CheckpointSection
from lmcore.train.resume.point import refuse_other_family, unknown_tokenizer

OTHER = ", or load another checkpoint"
ADD = "add `--model-family bert`, with the options of the model, or `--use-checkpoint-args`"


def judge(line: str, saved: str, *, foreign: bool = False) -> None:
    """Compare the family of a run's settings with a checkpoint's."""
    config = {"model": {"model_family": saved} if saved else {}}
    loaded = load_config(
        ["--load", "run", *line.split()],
        saved_settings=lambda _path, _step: SavedSettings("run", config, {}),
    )
    shape = {"model_family": saved} if saved else {}
    point = ResumePoint(Path("run"), SimpleNamespace(model_shape=shape), foreign=foreign)
    refuse_other_family(loaded, point)


def hint(line: str, saved: str, *, foreign: bool = False) -> str | None:
    """Return the hint for a run that loads a checkpoint of another family."""
    with pytest.raises(CheckpointArgumentError) as caught:
        judge(line, saved, foreign=foreign)
    assert caught.value.what == "`run` is of another family of models"
    family = "`bert`" if saved else "a decoder, GPT or Llama"
    assert f"it is {family}; " in str(caught.value.why)
    return caught.value.hint


@pytest.mark.parametrize(
    "line, saved",
    [
        ("--model-family bert", "bert"),
        ("--use-checkpoint-args", "bert"),
        ("--model-family gpt", ""),
        ("--model-family llama --normalization RMSNorm --swiglu", ""),
    ],
)
def test_the_same_family(line: str, saved: str) -> None:
    """Decoders are one family, whichever name is given."""
    judge(line, saved)


@pytest.mark.parametrize(
    "line, saved, expected",
    [
        ("--model-family gpt", "bert", f"use `--model-family bert`{OTHER}"),
        ("--model-family gpt --use-checkpoint-args", "bert", f"remove `--model-family`{OTHER}"),
        ("--model-family bert", "", f"remove `--model-family`{OTHER}"),
        ("--preset bert-base", "", f"use `--model-family gpt`{OTHER}"),
        ("", "bert", f"{ADD}{OTHER}"),
    ],
)
def test_another_family(line: str, saved: str, expected: str) -> None:
    """The hint is the change of the command that gives the family of the checkpoint."""
    assert hint(line, saved) == expected


def test_another_family_beside_the_model_of_another_program() -> None:
    """Its settings are taken without a flag."""
    assert hint("--model-family gpt", "bert", foreign=True) == f"remove `--model-family`{OTHER}"


def test_another_family_in_a_file(tmp_path: Path) -> None:
    """The line of the file is named."""
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  model_family: gpt\n")
    assert hint(f"{file} --use-checkpoint-args", "bert") == (
        f"delete `model_family` from `{file}:2`{OTHER}"
    )


@pytest.mark.parametrize("task", [None, "classification"])
def test_a_missing_tokenizer(task: str | None) -> None:
    """Prepared data names a tokenizer; the texts of a task do not."""
    point = ResumePoint(Path("run"), SimpleNamespace(meta={}), foreign=True)
    error = unknown_tokenizer(CheckpointSection(), point, task)
    assert error is not None
    assert error.what == "`run` has no tokenizer"
    assert "`--tokenizer-type` and its files" in str(error.hint)
    assert ("--data-path" in str(error.hint)) is (task is None)
