"""The loss scale of float16 in Megatron's files, and what a run does with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import GPT, MemoryState

from lmcore.checkpoint import read_manifest
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.megatron.optimizer.loss_scale import (
    megatron_loss_scale,
)
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.state import ModelState, Progress

SCALE = {"value": 65536.0, "good_steps": 12, "tolerance": 1}
SCALER = {"scale": torch.tensor([65536.0]), "growth_tracker": 12, "hysteresis_tracker": 1}
WRITERS = {"megatron": write_megatron, "megatron-dist": write_distributed}


def state_of(**changes: Any) -> MemoryState:
    progress = Progress(7, 70, 6, loss_scale=SCALE)
    return MemoryState(GPT, optimizer=True, progress=replace(progress, **changes))


def scale_of(state: ModelState) -> Any:
    assert state.progress is not None
    return state.progress.loss_scale


def content_file(path: Path) -> Path:
    """Return the file of Megatron that has the optimizer's settings."""
    (found,) = [*path.rglob("model_optim_rng.pt"), *path.rglob("common.pt")]
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_megatron(name: str, tmp_path: Path) -> None:
    """It is written as Megatron has it, read back, and kept by a run of lmcore."""
    WRITERS[name](state_of(), tmp_path / "in", None, dtype=torch.float16)
    saved = torch.load(content_file(tmp_path / "in"), weights_only=False)["optimizer"]
    assert saved["grad_scaler"] == SCALER
    assert scale_of(read_state(tmp_path / "in")) == SCALE
    assert scale_of(read_state(tmp_path / "in", weights_only=True)) is None
    done = convert(tmp_path / "in", tmp_path / "out", "lmcore")
    assert not any("loss scale" in note for note in done.notes)
    assert read_manifest(next(tmp_path.glob("out/checkpoints/iter_*"))).meta["loss_scale"] == SCALE


@pytest.mark.parametrize("name", WRITERS)
def test_other_dtypes(name: str, tmp_path: Path) -> None:
    """Only a run in float16 has a loss scale."""
    WRITERS[name](state_of(), tmp_path, None, dtype=torch.bfloat16)
    saved = torch.load(content_file(tmp_path), weights_only=False)["optimizer"]
    assert "grad_scaler" not in saved
    found = read_state(tmp_path)
    assert (scale_of(found), found.training_notes) == (None, [])


def test_a_loss_scale_that_is_not_known(tmp_path: Path) -> None:
    """A note says how a run in float16 continues; a fixed scale has no state."""
    write_megatron(state_of(loss_scale=None), tmp_path, None, dtype=torch.float16)
    found = read_state(tmp_path)
    assert scale_of(found) is None
    (note,) = found.training_notes
    assert "`--initial-loss-scale`" in note


@pytest.mark.parametrize(
    "scaler",
    [None, {}, SCALER | {"scale": -1.0}, SCALER | {"growth_tracker": None}, [SCALER, SCALER]],
)
def test_no_state_of_a_dynamic_scale(scaler: Any) -> None:
    assert megatron_loss_scale(scaler) is None
    assert megatron_loss_scale([SCALER]) == SCALE
