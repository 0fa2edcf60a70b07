"""Estimate of the Hessian diagonal for Sophia, updated before some of the steps.

Gauss-Newton-Bartlett estimator: labels are sampled from the model's own predictions on the step's
first micro-batch; the squared gradient of the mean loss against them, times the number of tokens,
has the diagonal of the Gauss-Newton matrix as its expectation.

Source: Liu et al., 2024, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lmcore.errors import RunError
from lmcore.parallel.scalar_collectives import all_reduce_scalars

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["estimate_hessian", "hessian_is_due", "require_sampled_targets"]


def require_sampled_targets(state: TrainState) -> None:
    """Raise if the optimizer needs an estimate and the model cannot sample its targets.

    Raises:
        RunError: The sample kind of the model has no targets to sample.
    """
    if state.optimizer.hessian_interval is not None and not state.model.sample_kind.targets:
        raise RunError(
            f"`--optimizer sophia` is not supported by {state.parallel.shape.family} models",
            why="it samples targets from the predictions of the model, which this family does not",
            hint="use another `--optimizer`, such as `adamw`",
        )


def hessian_is_due(state: TrainState) -> bool:
    """Return True if the optimizer needs an estimate before the next step."""
    interval = state.optimizer.hessian_interval
    return interval is not None and (state.iteration - state.skipped_iterations) % interval == 0


def estimate_hessian(
    state: TrainState,
    arguments: tuple[tuple[Tensor, ...], dict[str, Tensor]],
    context: Callable[[], AbstractContextManager[Any]],
    norm: Callable[[list[Tensor]], Tensor],
    runtime: Runtime,
) -> None:
    """Update the optimizer's Hessian estimate; all processes must call it.

    If the gradients overflow, as they may in fp16, the estimate stays as it is.

    Args:
        state: State of the run; its gradients are overwritten.
        arguments: Arguments of `Model.loss`, of one micro-batch; the loss is its mean times
            `state.loss_scale`.
        context: The precision's, in which a forward pass runs.
        norm: The bound `grad_norm`.
        runtime: The run.
    """
    parallel, scale = state.parallel, state.loss_scale.value
    kind, (tensors, options) = state.model.sample_kind, arguments
    named: dict[str, Any] = dict(zip(kind.arguments, tensors, strict=True))
    counted = float((named[kind.loss_weight] > 0).sum())
    parallel.zero_grad()
    without_targets = tuple((named | {kind.targets: None}).values())
    parallel.run([(without_targets, options)], 1, context)
    parallel.gradients()
    square, num_tokens = all_reduce_scalars(runtime, parallel.squared_grad_norm(norm), counted)
    if math.isfinite(square):
        state.optimizer.update_hessian(num_tokens / scale**2)
