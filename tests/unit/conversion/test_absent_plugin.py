"""Formats that a package brings which is not installed: the errors say which one."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from model_states import LLAMA, RandomState

from lmcore.base.errors import CheckpointArgumentError, ConfigError
from lmcore.cli.main import main
from lmcore.config.load import load_config
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.loading.foreign_model import describe_foreign
from lmcore.model.known_plugins import KnownPlugin
from lmcore.plugin import discover
from lmcore.train.resume.foreign import not_a_run

INSTALL = "run `pip install lmcore-deepspeed`, with the index or folder that lmcore came from"


@pytest.fixture(autouse=True)
def _absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the plugin off, where it is installed, and its package not found."""
    with suppress(PackageNotFoundError):
        distribution("lmcore-deepspeed")
        monkeypatch.setenv("LMCORE_PLUGIN_OFF", "deepspeed")
        discover(probe=False)
    monkeypatch.setattr(KnownPlugin, "is_installed", False)
    monkeypatch.setattr("lmcore.model.installation.sources", lambda: None)


@pytest.fixture(params=["", "global_step7"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a directory of DeepSpeed's, which may be one checkpoint."""
    place = tmp_path / "saved" / request.param
    place.mkdir(parents=True)
    (place / "mp_rank_00_model_states.pt").touch()
    return tmp_path / "saved"


@pytest.mark.parametrize("flag", ["--to", "--source-format"])
def test_a_name(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["checkpoint", "convert", str(tmp_path), str(tmp_path / "out")]
    argv += [flag, "megatron-deepspeed", *(["--to", "lmcore"] if flag != "--to" else [])]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert f"`{flag} megatron-deepspeed` needs the package `lmcore-deepspeed`, which is not" in said
    assert INSTALL in said


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "{}", "{}-out", "--to", "lmcore"],
        ["convert", "{}", "{}-out", "--to", "lmcore", "--ckpt-step", "7"],
        ["inspect", "{}"],
        ["inspect", "{}", "--ckpt-step", "7"],
        ["verify", "{}"],
        ["diff", "{}", "{}"],
    ],
    ids=" ".join,
)
def test_a_directory(words: list[str], saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads one names the program and the package."""
    assert main(["checkpoint", *(word.format(saved) for word in words)]) == 2
    said = capsys.readouterr().err
    assert f"`{saved}` cannot be read" in said
    assert "files of DeepSpeed, which the package `lmcore-deepspeed` reads; it is not" in said
    assert INSTALL in said


def test_runs(saved: Path) -> None:
    """`lmcore train` neither begins nor continues a run there."""
    for step in (None, "7"):
        with pytest.raises(CheckpointArgumentError, match="cannot be read"):
            describe_foreign(saved, step)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(["--continue", str(saved)], foreign_run=not_a_run)


def test_a_model_with_its_files(tmp_path: Path) -> None:
    """The weights of transformers are read; the note says what has the optimizer's state."""
    write_huggingface(RandomState(LLAMA), tmp_path, None)
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5/mp_rank_00_model_states.pt").touch()
    (note,) = HuggingFaceState(tmp_path).notes
    assert note.startswith("the state of its optimizer is not read: it has files of DeepSpeed")


def test_a_plugin_that_is_off(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that is installed is not to be installed."""
    monkeypatch.setattr(KnownPlugin, "is_installed", True)
    assert main(["checkpoint", "inspect", str(saved)]) == 2
    said = capsys.readouterr().err
    assert "its plugin adds no format here" in said
    assert "see `lmcore plugins`" in said
    argv = ["checkpoint", "convert", str(saved), f"{saved}-out", "--to", "megatron-deepspeed"]
    assert main(argv) == 2
    assert "`--to megatron-deepspeed`: unknown format" in capsys.readouterr().err
