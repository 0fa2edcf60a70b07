"""State of Adam on one rank, reasons not to read it, and its comparison with the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lmcore.conversion.state import OptimizerStateError
from lmcore.conversion.unread import same_values

__all__ = ["Moments", "UnreadOptimizer", "is_rounded", "other_optimizer", "require_rounded"]

_ADAMS = ("adam", "adamw", "cpuadam", "fusedadam")
"""Names of Adam in `--optimizer`, without the package that it is taken from."""


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


def other_optimizer(args: Mapping[str, Any]) -> str | None:
    """Return the name of the optimizer in the arguments of a run; None if it is Adam, or not known.

    ADOPT, LAMB and others have state with the names of Adam's.
    """
    name = args.get("optimizer")
    if not isinstance(name, str) or name.rpartition(".")[2].lower() in _ADAMS:
        return None
    return name


def is_rounded(main: Tensor, weight: Tensor) -> bool:
    """Return True if *weight* is the rounded main parameter.

    Args:
        main: Parameter of the optimizer.
        weight: Parameter of the model.
    """
    return main is weight or same_values(main.to(weight.dtype), weight)


def require_rounded(path: Path, name: str, main: Tensor, weight: Tensor) -> None:
    """Raise an `OptimizerStateError` unless *weight* is the rounded main parameter.

    Args:
        path: Directory of the checkpoint.
        name: Name of the parameter.
        main: Parameter of the optimizer.
        weight: Parameter of the model.
    """
    if not is_rounded(main, weight):
        raise OptimizerStateError(
            f"the optimizer's state in `{path}` does not fit the model",
            why=f"its parameter in the place of `{name}` is not the model's",
            hint="convert another checkpoint of the run, or take the weights without it: "
            "`lmcore checkpoint convert --weights-only`",
        )
