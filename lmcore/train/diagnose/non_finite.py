"""Diagnosis of numbers that are not finite: step, micro-batch, gradients and weights at fault."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import RunError
from lmcore.base.idle_work import is_finite_when_idle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from lmcore.train.state import TrainState

__all__ = [
    "HINT",
    "NonFiniteError",
    "check_copies",
    "check_weights",
    "is_finite",
    "non_finite",
    "non_finite_after_update",
    "where_in_run",
]

HINT = "lower `--lr`, lengthen the warm-up or set `--clip-grad`"
"""Hint of errors about numbers that are not finite; `RunReport` adds the checkpoint, if any."""


class NonFiniteError(RunError):
    """An error about loss, gradients or weights that became NaN or infinite; nothing is saved."""


def check_weights(state: TrainState) -> None:
    """Raise an error if an update has made weights NaN or infinite, before they are saved.

    Raises:
        NonFiniteError: Weights are not finite; the message names some of them.
    """
    _require_none(_non_finite_weights(state), state.iteration)


def check_copies(copies: Iterable[tuple[str, Tensor]], iteration: int) -> None:
    """Raise an error if copies of weights are NaN or infinite, before they are saved.

    Called by the thread that writes a checkpoint: with a lower priority than others, it uses idle
    processors.

    Args:
        copies: Names of weights, and contiguous parts of them on the host.
        iteration: Number of steps done before they were copied.

    Raises:
        NonFiniteError: Weights are not finite; the message names some of them.
    """
    bad = [name for name, copy in copies if not is_finite_when_idle(copy)]
    _require_none(list(dict.fromkeys(bad)), iteration)


def _require_none(bad: list[str], iteration: int) -> None:
    if bad:
        raise NonFiniteError(
            f"weights are not finite after step {iteration}: {_some(bad)}",
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
        losses: Losses of this rank's micro-batches, of each one or several.
        loss: Mean loss over all ranks.
        norm: Gradient norm over all ranks.
    """
    what, why = _culprit(state, samples, losses, loss, norm)
    bad = [
        name
        for name, parameter in state.parallel.named_parameters()
        if parameter.grad is not None and not is_finite(parameter.grad)
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
    where = where_in_run(state, samples)
    own = [float(micro_loss.sum()) for micro_loss in losses]
    bad_losses = [index for index, loss in enumerate(own) if not math.isfinite(loss)]
    if bad_losses:
        why = f"micro-batch {bad_losses[0] + 1} of {len(own)} is the first with such a loss"
        return f"the loss is {own[bad_losses[0]]} at {where}", why
    if not math.isfinite(loss):
        why = "the loss of another process is not finite, the loss of this process is"
        return f"the loss is {loss} at {where}", why
    why = "the loss is finite, its gradients are not"
    return f"the gradient norm is {norm} at {where}", why


def where_in_run(state: TrainState, samples: int) -> str:
    """Return the next step and its samples, for messages: "step 3, samples 32 to 47".

    Args:
        state: State before the step.
        samples: Number of samples in the step, over all ranks.
    """
    first = state.consumed_samples
    return f"step {state.iteration + 1}, samples {first} to {first + samples - 1}"


def _non_finite_weights(state: TrainState) -> list[str]:
    named = state.parallel.named_parameters()
    return [name for name, weight in named if not is_finite(weight)]


def is_finite(tensor: Tensor) -> bool:
    """Return True if a tensor has no NaN and no infinity.

    Its sum is computed in a tenth of the time; the sum of very large numbers is infinite, too.
    """
    values = tensor.detach()
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"`{name}`" for name in names[:4]) + more
