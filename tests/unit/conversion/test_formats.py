"""Directories without a checkpoint of a known format: the error says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_states import GPT2, RandomState

from lmcore.cli.main import main
from lmcore.config.section import CheckpointSection
from lmcore.conversion.formats import read_state, unrecognized
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.errors import CheckpointError
from lmcore.train.resume.resume_point import find_resume_point


@pytest.mark.parametrize(
    "names, reason, hint",
    [
        (["config.json"], "no weights: looked for `model.safetensors`", "download"),
        (["config.json", "x.safetensors"], "`x.safetensors` is none of these", "download"),
        (["model.safetensors"], "no `config.json`", "copy the model's `config.json`"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter", "merge_and_unload"),
        (["consolidated.safetensors", "params.json"], "own program", "`model.safetensors`"),
        (["model-q4.gguf"], "GGUF", "from which"),
    ],
)
def test_parts_of_a_model(tmp_path: Path, names: list[str], reason: str, hint: str) -> None:
    """All commands say the same."""
    for name in names:
        (tmp_path / name).touch()
    errors = []
    for read in (
        lambda: read_state(tmp_path),
        lambda: find_resume_point(CheckpointSection(load=str(tmp_path))),
    ):
        with pytest.raises(CheckpointError) as caught:
            read()
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert reason in str(caught.value.why)
    assert hint in str(caught.value.hint)
    assert caught.value.exit_status == 2


def test_a_checkpoint_one_level_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the cache of huggingface_hub, and in the directory that a trainer writes to."""
    for folder in ("hub/snapshots/abc", "trainer/checkpoint-500"):
        (tmp_path / folder).mkdir(parents=True)
        write_huggingface(RandomState(GPT2), tmp_path / folder, None)
        outer = str(tmp_path / folder.partition("/")[0])
        for command in (
            ["generate", "--load"],
            ["checkpoint", "inspect"],
            ["checkpoint", "verify"],
        ):
            assert main([*command, outer]) == 2
            assert f"did you mean `{tmp_path / folder}`?" in capsys.readouterr().err


def test_nothing_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert unrecognized(tmp_path) is None
    assert unrecognized(tmp_path / "absent") is None
    assert unrecognized(tmp_path / "notes.txt") is None
