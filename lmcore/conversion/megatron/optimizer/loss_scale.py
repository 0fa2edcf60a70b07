"""Loss scale of float16: Megatron's `grad_scaler` and lmcore's state.

Both double the scale after some steps without an overflow, and halve it after overflows.
lmcore's state has the names of `lmcore.optim.loss_scale.DynamicLossScale`: `value`, `good_steps`
and `tolerance`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState, Progress

__all__ = [
    "grad_scaler",
    "megatron_loss_scale",
    "scale_state",
    "unknown_scale_notes",
]


def megatron_loss_scale(scaler: object) -> dict[str, float] | None:
    """Return the loss scale in Megatron's `grad_scaler`; None if it is not dynamic, or not known.

    Args:
        scaler: Value of `grad_scaler` in the state of an optimizer.
    """
    if isinstance(scaler, list) and len(scaler) == 1:  # as an object of `torch_dist`
        (scaler,) = scaler
    if not isinstance(scaler, dict):
        return None
    names = ("scale", "growth_tracker", "hysteresis_tracker")
    return scale_state(*(scaler.get(name) for name in names))


def scale_state(value: Any, good_steps: Any, tolerance: Any) -> dict[str, float] | None:
    """Return the state of a loss scale; None if the values are no such state.

    Args:
        value: The scale, a number or a tensor of one.
        good_steps: Steps without an overflow since the scale changed.
        tolerance: Number of overflows until the scale is halved.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if type(value) not in {int, float} or not 0 < value < math.inf:
        return None
    if type(good_steps) is not int or good_steps < 0 or type(tolerance) is not int:
        return None
    return {"value": float(value), "good_steps": good_steps, "tolerance": tolerance}


def grad_scaler(progress: Progress | None, dtype: torch.dtype) -> dict[str, Any]:
    """Return the part of Megatron's optimizer that has the loss scale; empty without one.

    Args:
        progress: Position of the run.
        dtype: Dtype of the model's weights.
    """
    if progress is None or progress.loss_scale is None or dtype != torch.float16:
        return {}
    scale = progress.loss_scale
    content = {
        "scale": torch.tensor([float(scale["value"])]),
        "growth_tracker": scale["good_steps"],
        "hysteresis_tracker": scale["tolerance"],
    }
    return {"grad_scaler": content}


def unknown_scale_notes(state: ModelState) -> list[str]:
    """Return a note if a run in float16 continues without the loss scale of the checkpoint.

    Args:
        state: State that was read.
    """
    progress = state.progress
    half = state.settings.get("precision") == "fp16" and len(state.kinds) > 1
    if not half or progress is None or progress.loss_scale is not None:
        return []
    note = (
        "no dynamic loss scale is read: a run that continues begins with `--initial-loss-scale`, "
        "and skips steps until the scale fits"
    )
    return [note]
