"""Directories without a checkpoint of a known format: the error says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_states import GPT2, RandomState

from lmcore.base.errors import CheckpointError, PluginError
from lmcore.checkpoint import save_checkpoint
from lmcore.cli.main import main
from lmcore.config.section import CheckpointSection
from lmcore.conversion.formats import WriteOptions, read_state, unrecognized, write_state
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.model.checkpoint_format import CheckpointFormat, formats
from lmcore.train.resume.point import find_resume_point


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


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--load"),
        ("train", "--load"),
        ("train", "--use-checkpoint-args", "--load"),
        ("train", "--ckpt-step", "3", "--load"),
        ("checkpoint", "inspect"),
        ("checkpoint", "verify"),
    ],
)
def test_nothing_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """Every command that takes all formats says what it looked for, and what is there."""
    (tmp_path / "some/sub").mkdir(parents=True)
    (tmp_path / "some/notes.txt").touch()
    for folder, found in (("some", "it has `notes.txt`, `sub/`"), ("some/sub", "it is empty")):
        assert main([*command, str(tmp_path / folder)]) == 2
        said = capsys.readouterr().err
        assert f"no checkpoint in `{tmp_path / folder}`\nwhy: {found}; looked for" in said
        for one in formats().values():
            assert f"  {one.title}: {one.files}\n" in said
        assert "of a model of another program" in said.partition("hint: ")[2]


def test_no_directory(tmp_path: Path) -> None:
    """The hint of a path that is no directory has every form of a checkpoint too."""
    (tmp_path / "notes.txt").touch()
    for name, what in (("absent", "no such directory"), ("notes.txt", "is a file")):
        problem = unrecognized(tmp_path / name)
        assert problem is not None
        assert what in problem.what
        assert "of a model of another program" in str(problem.hint)


def test_a_checkpoint_that_a_killed_process_hid(tmp_path: Path) -> None:
    """A save that was killed between its two renames leaves it to every command."""
    save_checkpoint(tmp_path / "run", 1, {"w": torch.ones(2)}, {}, model_shape={})
    (tmp_path / "run/iter_0000001").rename(tmp_path / "run/.iter_0000001.replaced-0-0")
    assert unrecognized(tmp_path / "run") is None
    with pytest.raises(CheckpointError, match="cannot be built"):  # it has no model's shape
        read_state(tmp_path / "run")
    (tmp_path / "run/.iter_0000001.replaced-0-0/manifest.json").write_text("{")
    assert unrecognized(tmp_path / "run") is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_state(tmp_path / "run")


def failing_write(*_arguments: object, **_options: object) -> None:
    """Fail as a plugin's function may."""
    raise ZeroDivisionError("by zero")


def full_disk(*_arguments: object, **_options: object) -> None:
    """Fail as a file system does."""
    raise OSError(28, "No space left on device")


def test_a_format_of_a_plugin_that_cannot_write(tmp_path: Path) -> None:
    """The error names the format; what the file system refuses is the caller's."""
    title = {"title": "Odd", "described": "a checkpoint of Odd", "matches": Path.is_file}
    odd, full = (
        CheckpointFormat("odd", read="", write=f"{__name__}:{one.__name__}", **title)
        for one in (failing_write, full_disk)
    )
    with pytest.raises(PluginError, match="cannot be written as a checkpoint of Odd") as caught:
        write_state(odd, RandomState(GPT2), tmp_path, None, WriteOptions())
    assert "`odd` of a plugin raised ZeroDivisionError: by zero" in str(caught.value.why)
    with pytest.raises(OSError, match="No space left"):
        write_state(full, RandomState(GPT2), tmp_path, None, WriteOptions())
