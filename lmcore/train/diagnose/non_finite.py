"""Numbers that are not finite: which step, micro-batch, gradients and weights are to blame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lmcore.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.train.state import TrainState

__all__ = ["HINT", "NonFiniteError", "check_weights", "non_finite", "non_finite_after_update"]

HINT = "lower `--lr`, lengthen the warm-up or set `--clip-grad`; continue from the last save"
"""What to do where numbers are not finite."""


class NonFiniteError(RunError):
    """Loss or gradients became NaN or infinite; nothing is saved after that."""


def check_weights(state: TrainState) -> None:
    """Refuse weights that an update has made NaN or infinite, before they are saved.

    Raises:
        NonFiniteError: Names some of them.
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
    """Return the error of a step that was not taken, with what is to blame.

    Args:
        state: As it was before the step, but for its gradients.
        samples: Of the step.
        losses: Of this process's micro-batches.
        loss: Of all processes.
        norm: Of the gradients of all processes.
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
        why = "this one's is"
    if weights:
        why += f"; weights that are not finite: {_some(weights)}"
    elif bad:
        why += f"; gradients that are not finite: {_some(bad)}"
    if state.loss_scale.limit:
        why += f"; {state.loss_scale.limit}"
    return NonFiniteError(what, why=f"{why}; nothing was updated in this step", hint=HINT)


def non_finite_after_update(
    state: TrainState, samples: int, losses: list[Tensor], loss: float, norm: float
) -> NonFiniteError:
    """Return the error of a step that was taken all the same; see `non_finite`.

    Which gradients are to blame is not known any more.
    """
    what, why = _culprit(state, samples, losses, loss, norm)
    return NonFiniteError(
        what,
        why=f"{why}; it was found after the update, so that nothing was saved since",
        hint=f"{HINT}; with `--no-async-metrics` the message names the parameters",
    )


def _culprit(
    state: TrainState, samples: int, losses: list[Tensor], loss: float, norm: float
) -> tuple[str, str]:
    """Return what is not finite after a step of which *state* has not heard, and the reason."""
    first = state.consumed_samples
    where = f"step {state.iteration + 1}, samples {first} to {first + samples - 1}"
    own = [float(one) for one in losses]
    bad_losses = [index for index, loss in enumerate(own) if not math.isfinite(loss)]
    if bad_losses:
        why = f"micro-batch {bad_losses[0] + 1} of {len(own)} is the first such"
        return f"the loss is {own[bad_losses[0]]} at {where}", why
    if not math.isfinite(loss):
        why = "that of another process is not finite, this one's is"
        return f"the loss is {loss} at {where}", why
    why = "the loss is finite, its gradients are not"
    return f"the gradient norm is {norm} at {where}", why


def _non_finite_weights(state: TrainState) -> list[str]:
    named = state.parallel.named_parameters()
    return [name for name, weight in named if not bool(torch.isfinite(weight).all())]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"`{name}`" for name in names[:4]) + more
