"""State of Adam in one rank's file, however Megatron stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = [
    "INNER",
    "Moments",
    "UnreadOptimizer",
    "group_values",
    "other_optimizer",
    "settings_of",
    "step_of",
]

INNER = ("optimizer", "optimizer_state_dict")
"""Keys under which the state of torch's optimizer is inside of Megatron's."""

_ADAMS = ("adam", "adamw", "cpuadam", "fusedadam")
"""Names of Adam in `--optimizer`, without the package that it is taken from."""
_MAX_STEP = 2**63
_MAX_LEVELS = 3
"""Number of optimizers around torch's own, at most."""


class UnreadOptimizer(Exception):  # noqa: N818 - no error: the weights can still be read
    """Reason for which the state of an optimizer is left out."""


@dataclass(frozen=True)
class Moments:
    """State of Adam in one rank's file.

    Attributes:
        tensors: Tensors of each kind, in the order of the file's parameters.
        step: Number of updates; None if the file does not say.
        settings: Settings of Adam, with the names of `Progress.adam`.
        loss_scale: Loss scale, with the names of `Progress.loss_scale`; None without one.
    """

    tensors: Mapping[str, Sequence[Tensor]]
    step: int | None
    settings: Mapping[str, float]
    loss_scale: Mapping[str, float] | None = None


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


def other_optimizer(args: Mapping[str, Any]) -> str | None:
    """Return the name of the optimizer in the arguments of a run; None if it is Adam, or not known.

    ADOPT, LAMB and others have state with the names of Adam's.
    """
    name = args.get("optimizer")
    if not isinstance(name, str) or name.rpartition(".")[2].lower() in _ADAMS:
        return None
    return name


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def step_of(value: object) -> int | None:
    """Return a number of updates, saved as a number or as a tensor; None if it is neither.

    Args:
        value: Value of `step`.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return int(value) if isinstance(value, int | float) and 0 <= value < _MAX_STEP else None
