"""`--continue` with a directory of another program: what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed_plugin import with_deepspeed

from lmcore.base.errors import ConfigError
from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.load import load_config
from lmcore.config.rules.needs import note_without_effect
from lmcore.train.resume.foreign import not_a_run

RANK, MODEL = "mp_rank_00/model_optim_rng.pt", "mp_rank_00_model_states.pt"


@pytest.fixture(autouse=True)
def _deepspeed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Adds the format of its plugin."""
    with with_deepspeed(tmp_path_factory, monkeypatch):
        yield


def touched(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_megatron_and_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names the conversion that keeps the optimizer, and the start with the weights."""
    monkeypatch.chdir(tmp_path)
    touched(Path("meg/iter_0000100") / RANK, Path("ds/global_step100") / MODEL)
    touched(Path("two/iter_0000100") / RANK, Path("two/iter_0000200") / RANK)
    for path, name in {
        "meg": "Megatron-LM",
        "meg/iter_0000100": "Megatron-LM",
        "two": "Megatron-LM",
        "ds": "DeepSpeed",
        "ds/global_step100": "DeepSpeed",
    }.items():
        with pytest.raises(ConfigError, match=f"--continue {path}") as caught:
            load_config(["--continue", path], foreign_run=not_a_run)
        assert f"a checkpoint of {name}, not a run of lmcore" in caught.value.what
        hint = str(caught.value.hint)
        assert f"`lmcore checkpoint convert {path} RUN --to lmcore`" in hint
        assert f"`--load {path}` begins a run with its weights, optimizer state and step" in hint
    with pytest.raises(ConfigError) as caught:
        load_config(["--continue", "two", "--ckpt-step", "100"], foreign_run=not_a_run)
    hint = str(caught.value.hint)
    assert "`lmcore checkpoint convert two RUN --to lmcore --ckpt-step 100`" in hint
    assert "`--load two --ckpt-step 100` begins a run" in hint


def test_hugging_face(tmp_path: Path) -> None:
    """It has weights alone, unless DeepSpeed's files are in it."""
    touched(tmp_path / "config.json", tmp_path / "model.safetensors")
    problem = not_a_run(tmp_path)
    assert problem is not None
    assert "convert" not in str(problem.hint)
    assert f"`--load {tmp_path}` begins a run" in str(problem.hint)
    touched(tmp_path / "global_step100" / MODEL)
    problem = not_a_run(tmp_path)
    assert problem is not None
    assert "--source-format megatron-deepspeed`" in str(problem.hint)


def test_anything_else(tmp_path: Path) -> None:
    """The error is the one for a path without a run."""
    assert not_a_run(tmp_path) is None
    assert not_a_run(tmp_path / "missing") is None
    with pytest.raises(ConfigError, match="no run found"):
        load_config(["--continue", str(tmp_path)], foreign_run=not_a_run)


def test_settings_of_a_run_that_continues() -> None:
    """They have no effect on a run from another program's weights, and the note says why."""
    loaded = load_config(
        ["--load", "meg", "--schedule", "keep", "--no-load-optim", "--profile-memory"],
        foreign_settings=lambda path, _step: SavedSettings(str(path), {}, {}, continues=False),
    )
    note = note_without_effect(loaded) or ""
    assert "--no-finetune" not in note
    assert (
        "`--no-load-optim`, `--schedule keep` (only for a run that continues: from `meg`, a "
        "checkpoint of another program without the state of a run, a run begins at step 0)" in note
    )
    assert "`--profile-memory` (needs " in note
