"""The loss scale in universal checkpoints: DeepSpeed's object, which a run of it takes over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import DynamicLossScaler, Layout, edit, importable, write
from megatron_models import GPT, MemoryState

from lmcore.checkpoint import read_manifest
from lmcore.conversion.convert import convert
from lmcore.conversion.state import Progress
from lmcore.optim.loss_scale import DynamicLossScale
from lmcore_deepspeed.checkpoint.loss_scaler import (
    deepspeed_loss_scale,
    loss_scaler,
    loss_scaler_note,
)
from lmcore_deepspeed.checkpoint.read import read_deepspeed
from lmcore_deepspeed.checkpoint.write import write_deepspeed

SCALE = {"value": 65536.0, "good_steps": 12, "tolerance": 1}


def progress_of(scale: DynamicLossScale | None = None) -> Progress:
    return Progress(7, 70, 6, loss_scale=SCALE if scale is None else scale.state())


def written(root: Path, progress: Progress, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the optimizer's file of a universal checkpoint, and the notes."""
    state = MemoryState(GPT, optimizer=True, progress=progress)
    state.settings = settings
    notes = write_deepspeed(state, root, None, dtype=torch.float16)
    path = root / "global_step7" / "zero" / "optimizer_state.pt"
    with importable():
        content: dict[str, Any] = torch.load(path, weights_only=False)
    return content, notes


def test_it_comes_back(tmp_path: Path) -> None:
    """A loss scale is read as it was written, and a run continues with it."""
    content, _ = written(tmp_path / "in", progress_of())
    assert (content["dynamic_loss_scale"], content["overflow"]) == (True, False)
    found = read_deepspeed(tmp_path / "in")
    assert found.progress is not None
    assert found.progress.loss_scale == SCALE
    assert found.training_notes == []
    done = convert(tmp_path / "in", tmp_path / "out", "lmcore")
    assert not any("loss scale" in note for note in done.notes)
    assert read_manifest(next(tmp_path.glob("out/checkpoints/iter_*"))).meta["loss_scale"] == SCALE


def test_settings(tmp_path: Path) -> None:
    """Window, hysteresis and smallest scale are the run's, and a note names them."""
    settings = {"loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2.0}
    content, notes = written(tmp_path, progress_of(), **settings)
    scaler = vars(content["loss_scaler"])
    assert (scaler["scale_window"], scaler["delayed_shift"], scaler["min_scale"]) == (500, 3, 2.0)
    (note,) = (note for note in notes if "loss scale" in note)
    for part in ("`loss_scale_window` 500", "`hysteresis` 3", "`min_loss_scale` 2"):
        assert part in note


@pytest.mark.parametrize("overflows", [(), (0, 1, 2), (3, 9, 10, 30), (36,)], ids=range(4))
@pytest.mark.parametrize("rest", ["good steps", "overflows"])
def test_it_goes_on_alike(overflows: tuple[int, ...], rest: str, tmp_path: Path) -> None:
    """DeepSpeed doubles and halves the scale at the steps at which a run of lmcore would.

    After good steps that follow an overflow they differ: DeepSpeed does not count the first one.
    """
    ours = DynamicLossScale(2.0**16, window=8)
    for step in range(37):
        ours.update(overflow=step in overflows)
    content, _ = written(tmp_path, progress_of(ours), loss_scale_window=8)
    theirs = content["loss_scaler"]
    assert type(theirs) is DynamicLossScaler
    for step in range(30):
        ours.update(overflow=rest == "overflows")
        theirs.update_scale(rest == "overflows")
        assert theirs.cur_scale == ours.value, step


@pytest.mark.parametrize(
    "progress, dtype",
    [
        (progress_of(), torch.bfloat16),
        (None, torch.float16),
        (replace(progress_of(), loss_scale=None), torch.float16),
    ],
    ids=["bfloat16", "no run", "no scale"],
)
def test_no_dynamic_scale(progress: Progress | None, dtype: torch.dtype) -> None:
    assert loss_scaler(progress, {}, dtype) == {}
    assert loss_scaler_note(progress, {}, dtype) == []


def test_an_object_of_deepspeeds(tmp_path: Path) -> None:
    """A note says that a scale is not known; DeepSpeed's own object is read."""
    content, _ = written(tmp_path, replace(progress_of(), loss_scale=None))
    assert "loss_scaler" not in content
    found = read_deepspeed(tmp_path)
    assert any("loss scale" in note for note in found.training_notes)
    path = tmp_path / "global_step7" / "zero" / "optimizer_state.pt"
    with importable():
        torch.save(content | {"loss_scaler": DynamicLossScaler(4096.0, 8, 2)}, path)
    found = read_deepspeed(tmp_path)
    assert found.progress is not None
    assert found.progress.loss_scale == {"value": 4096.0, "good_steps": 0, "tolerance": 2}
    assert found.training_notes == []


@pytest.mark.parametrize("scaler", [None, {}, {"cur_iter": 7}, {"cur_scale": -1.0}])
def test_no_state_of_a_dynamic_scale(scaler: Any) -> None:
    known = {"cur_scale": 2.0, "cur_iter": 9, "last_overflow_iter": 3, "scale_window": 8}
    known |= {"cur_hysteresis": 1}
    assert deepspeed_loss_scale(known) == {"value": 2.0, "good_steps": 4, "tolerance": 1}
    assert deepspeed_loss_scale(scaler and known | dict.fromkeys(scaler, None)) is None


@pytest.mark.parametrize("overflows", [(), (0, 1, 2), (0, 9, 10, 30)], ids=str)
@pytest.mark.parametrize("rest", ["good steps", "overflows"])
def test_steps_of_deepspeed(overflows: tuple[int, ...], rest: str, tmp_path: Path) -> None:
    """A run of lmcore doubles and halves the scale at the steps at which DeepSpeed would."""
    scaler = DynamicLossScaler(2.0**16, window=8, hysteresis=2)
    for step in range(37):
        scaler.update_scale(step in overflows)
    directory = write(
        MemoryState(GPT, optimizer=True), tmp_path, Layout(zero=1, dtype=torch.float16)
    )
    (path,) = directory.glob("*optim*")
    edit(path, lambda content: content["optimizer_state_dict"].update(loss_scaler=scaler))
    progress = read_deepspeed(tmp_path).progress
    assert progress is not None
    assert progress.loss_scale is not None
    continued = DynamicLossScale(window=8)
    continued.restore(progress.loss_scale)
    for step in range(20):
        scaler.update_scale(rest == "overflows")
        continued.update(overflow=rest == "overflows")
        assert continued.value == scaler.cur_scale, step
