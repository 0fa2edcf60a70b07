"""Diagnosis of numbers that are not finite: step, micro-batch, gradients and weights at fault."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lmcore.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.train.state import TrainState

__all__ = ["HINT", "NonFiniteError", "check_weights", "non_finite", "non_finite_after_update"]

HINT = "lower `--lr`, lengthen the warm-up or set `--clip-grad`"
"""Hint of errors about numbers that are not finite; `RunReport` adds the checkpoint, if any."""


class NonFiniteError(RunError):
    """An error about loss, gradients or weights that became NaN or infinite; nothing is saved."""


def check_weights(state: TrainState) -> None:
    """Raise an error if an update has made weights NaN or infinite, before they are saved.

    Raises:
        NonFiniteError: Weights are not finite; the message names some of them.
    """
    bad = _non_finite_weights(state)
    if bad:
        raise NonFiniteError(
            f"weights are not finite after step {state.iteration}: {_some(bad)}",
            why="the last update moved them too far; they are not saved",
            hint=HINT,
        )


def non_finite(
    state: TrainState, samples: int, losses: list[Tensor], loss: float, norm: float
) -> NonFiniteError:
    """Return the error of a step without update, with micro-batch and parameters at fault.

    Args:
        state: State before the step, with the gradients of the step.
        samples: Number of samples in the step, over all ranks.
        losses: Losses of this rank's micro-batches.
        loss: Mean loss over all ranks.
        norm: Gradient norm over all ranks.
    """
    what, why = _culprit(state, samples, losses, loss, norm)
    bad = [
        name
        for name, parameter in state.parallel.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    weights = _non_finite_weights(state)
    if not bad and math.isfinite(loss):
        where = what.partition(" at ")[2]
        what = f"the gradient norm of another process is not finite at {where}"
        why = "the norm of this process is finite"
    if weights:
        why += f"; weights not finite: {_some(weights)}"
    elif bad:
        why += f"; gradients not finite: {_some(bad)}"
    if state.loss_scale.limit:
        why += f"; {state.loss_scale.limit}"
    return NonFiniteError(what, why=f"{why}; nothing was updated in this step", hint=HINT)


def non_finite_after_update(
    state: TrainState, samples: int, losses: list[Tensor], loss: float, norm: float
) -> NonFiniteError:
    """Return the error of a step whose update was queued; see `non_finite`.

    The gradients at fault are not known any more.
    """
    what, why = _culprit(state, samples, losses, loss, norm)
    return NonFiniteError(
        what,
        why=f"{why}; found after the update, nothing was saved since",
        hint=f"{HINT}; with `--no-async-metrics` the message names the parameters",
    )


def _culprit(
    state: TrainState, samples: int, losses: list[Tensor], loss: float, norm: float
) -> tuple[str, str]:
    """Return the number that is not finite, with its place, and the reason; see `non_finite`."""
    first = state.consumed_samples
    where = f"step {state.iteration + 1}, samples {first} to {first + samples - 1}"
    own = [float(micro_loss) for micro_loss in losses]
    bad_losses = [index for index, loss in enumerate(own) if not math.isfinite(loss)]
    if bad_losses:
        why = f"micro-batch {bad_losses[0] + 1} of {len(own)} is the first with such a loss"
        return f"the loss is {own[bad_losses[0]]} at {where}", why
    if not math.isfinite(loss):
        why = "the loss of another process is not finite, the loss of this process is"
        return f"the loss is {loss} at {where}", why
    why = "the loss is finite, its gradients are not"
    return f"the gradient norm is {norm} at {where}", why


def _non_finite_weights(state: TrainState) -> list[str]:
    named = state.parallel.named_parameters()
    return [name for name, weight in named if not bool(torch.isfinite(weight).all())]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"`{name}`" for name in names[:4]) + more
