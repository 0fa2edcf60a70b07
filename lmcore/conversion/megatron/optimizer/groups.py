"""Parameter groups of Adam in Megatron's optimizer: settings and number of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lmcore.conversion.state import Progress

__all__ = ["INNER", "group_contents", "group_values", "settings_of", "step_of", "updates"]

INNER = ("optimizer", "optimizer_state_dict")
"""Keys under which the state of torch's optimizer is inside of Megatron's."""

_MAX_STEP = 2**63
_MAX_LEVELS = 3
"""Number of optimizers around torch's own, at most."""
_DEFAULTS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
"""Megatron's defaults of Adam."""


def group_values(content: object) -> tuple[int | None, dict[str, float]]:
    """Return number of updates and settings of Adam from the groups of a saved optimizer.

    Args:
        content: Value of `optimizer` without the state of the parameters.
    """
    inner = content
    for _ in range(_MAX_LEVELS):  # a mapping in a file can contain itself
        if not isinstance(inner, dict) or "param_groups" in inner:
            break
        inner = next((inner[name] for name in INNER if name in inner), None)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        return None, {}
    groups = [group for group in inner["param_groups"] if isinstance(group, dict)]
    state = inner.get("state")
    common = state.get("common_step") if isinstance(state, dict) else None
    steps = [step_of(value) for value in (common, *(group.get("step") for group in groups))]
    known = [step for step in steps if step is not None]
    return max(known, default=None), settings_of(groups)


def settings_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the settings of Adam in an optimizer's groups.

    Groups of biases and gains have a weight decay of 0, so the largest one belongs to the matrices.
    """
    found: dict[str, Any] = {}
    for group in groups:
        betas = group.get("betas")
        if isinstance(betas, list | tuple) and len(betas) == 2:
            found |= {"beta1": betas[0], "beta2": betas[1]}
        found |= {name: group[name] for name in ("eps",) if name in group}
    decays = [group["weight_decay"] for group in groups if _is_number(group.get("weight_decay"))]
    found |= {"weight_decay": max(decays)} if decays else {}
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def step_of(value: object) -> int | None:
    """Return a number of updates, saved as a number or as a tensor; None if it is neither.

    Args:
        value: Value of `step`.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return int(value) if isinstance(value, int | float) and 0 <= value < _MAX_STEP else None


def updates(progress: Progress | None) -> int:
    """Return the number of updates that Adam has made.

    Args:
        progress: Position of the run.
    """
    return (progress.optimizer_step or progress.iteration) if progress else 0


def group_contents(progress: Progress | None) -> list[dict[str, Any]]:
    """Return Megatron's two groups of parameters, with weight decay and without.

    Args:
        progress: Position of the run.
    """
    settings = {**_DEFAULTS, **((progress.adam or {}) if progress else {})}
    schedule = (progress.schedule or {}) if progress else {}
    rate = float(schedule.get("highest", 0.0))
    return [
        {
            "lr": rate,
            "bias_correction": True,
            "betas": (settings["beta1"], settings["beta2"]),
            "eps": settings["eps"],
            "weight_decay": settings["weight_decay"] if decays else 0.0,
            "wd_mult": 1.0 if decays else 0.0,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": rate,
            "min_lr": float(schedule.get("lowest", 0.0)),
            "step": updates(progress),
        }
        for decays in (True, False)
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
