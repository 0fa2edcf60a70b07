"""The checkpoint that `--ckpt-step` chooses in another program's directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed_plugin import with_deepspeed

from lmcore.base.errors import CheckpointArgumentError, CheckpointError, ConfigError
from lmcore.conversion.checkpoint_step import foreign_checkpoint
from lmcore.conversion.formats import read_state

FILES = {
    "megatron": ("iter_{:07d}", "mp_rank_00/model_optim_rng.pt"),
    "megatron-deepspeed": ("global_step{}", "mp_rank_00_model_states.pt"),
}


@pytest.fixture(autouse=True)
def _deepspeed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Adds the format of its plugin."""
    with with_deepspeed(tmp_path_factory, monkeypatch):
        yield


@pytest.fixture(params=list(FILES))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """Return a directory with checkpoints of steps 200 and 1000, and the form of their names."""
    name, file = FILES[request.param]
    for step in (200, 1000):
        path = tmp_path / "saved" / name.format(step) / file
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path / "saved", name


@pytest.mark.parametrize("text", ["200", "0200", "iter_0000200", "global_step200"])
def test_a_step(saved: tuple[Path, str], text: str) -> None:
    """A number, or a name of Megatron's or DeepSpeed's, which no file has to name as the newest."""
    directory, name = saved
    expected = directory / name.format(200)
    assert foreign_checkpoint(directory, text) == expected
    assert foreign_checkpoint(expected, text) == expected


def test_a_step_that_is_not_there(saved: tuple[Path, str]) -> None:
    """The error lists the steps, in the order of numbers, and suggests the nearest."""
    directory, name = saved
    with pytest.raises(CheckpointArgumentError, match="no checkpoint of step 300") as caught:
        foreign_checkpoint(directory, "300")
    assert caught.value.why == "there are checkpoints of steps 200, 1000"
    assert "`--ckpt-step 200`" in str(caught.value.hint)
    (directory / name.format(300)).mkdir()
    with pytest.raises(CheckpointArgumentError, match="has no checkpoint") as caught:
        foreign_checkpoint(directory, "300")
    assert name.format(300) in caught.value.what
    with pytest.raises(CheckpointArgumentError, match="marked as the best") as caught:
        foreign_checkpoint(directory, "best")
    assert "steps 200, 1000" in str(caught.value.why)
    with pytest.raises(ConfigError, match="expected the number of a step"):
        foreign_checkpoint(directory, "last")


def test_names_without_a_step(saved: tuple[Path, str]) -> None:
    """Megatron's `release` and DeepSpeed's other tags are listed by their names."""
    directory, name = saved
    other = "release" if name.startswith("iter") else "global_step1000_universal"
    (directory / name.format(1000)).rename(directory / other)
    with pytest.raises(CheckpointArgumentError) as caught:
        foreign_checkpoint(directory, "1000")
    assert caught.value.why == f"there are checkpoints of step 200 and `{other}`"


def test_without_a_step_the_checkpoints_are_listed(saved: tuple[Path, str]) -> None:
    """No file names the newest: the error says which ones there are, and suggests the last one."""
    directory, name = saved
    names = [name.format(step) for step in (200, 1000)]
    with pytest.raises(CheckpointError, match="which checkpoint is the newest") as caught:
        read_state(directory)
    assert ", ".join(f"`{one}`" for one in names) in str(caught.value.why)
    assert f"`{directory / names[1]}`" in str(caught.value.hint)


def test_other_directories(tmp_path: Path) -> None:
    """A run of lmcore chooses for itself, and a model of Hugging Face has no steps."""
    run = tmp_path / "run/checkpoints/iter_0000100"
    run.mkdir(parents=True)
    (run / "manifest.json").touch()
    assert foreign_checkpoint(tmp_path / "run", "100") is None
    assert foreign_checkpoint(tmp_path / "missing", "100") is None
    assert foreign_checkpoint(tmp_path, "100") is None
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    with pytest.raises(ConfigError, match="--ckpt-step 100") as caught:
        foreign_checkpoint(model, "100")
    assert caught.value.why == "it is a model of Hugging Face, without steps"
