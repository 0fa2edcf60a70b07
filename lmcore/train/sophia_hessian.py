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

from lmcore.base.errors import RunError
from lmcore.parallel.scalar_collectives import all_reduce_scalars

if TYPE_CHECKING:
    from lmcore.data.loading.batch import Batch
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState
    from lmcore.train.token_mean import TokenMean

__all__ = ["estimate_hessian", "hessian_is_due", "require_sampled_targets"]


def require_sampled_targets(state: TrainState) -> None:
    """Raise if the optimizer needs an estimate and the model cannot sample its targets.

    Raises:
        RunError: The family of the model has no targets to sample.
    """
    if state.optimizer.hessian_interval is not None and not state.model.family.targets:
        raise RunError(
            f"`--optimizer sophia` is not supported by {state.model.family.name} models",
            why="it samples targets from the predictions of the model, which this family does not",
            hint="use another `--optimizer`, such as `adamw`",
        )


def hessian_is_due(state: TrainState) -> bool:
    """Return True if the optimizer needs an estimate before the next step."""
    interval = state.optimizer.hessian_interval
    return interval is not None and (state.iteration - state.skipped_iterations) % interval == 0


def estimate_hessian(
    state: TrainState,
    batch: Batch,
    mean: TokenMean,
    context: Callable[[], AbstractContextManager[Any]],
    norm: Callable[[list[Tensor]], Tensor],
    runtime: Runtime,
) -> None:
    """Update the optimizer's Hessian estimate; all processes must call it.

    If the gradients overflow, as they may in fp16, or no target of the ranks' micro-batches is
    valid, the estimate stays as it is.

    Args:
        state: State of the run; its gradients are overwritten.
        batch: The step's first micro-batch of this rank.
        mean: Mean of the loss, without micro-batches.
        context: The precision's, in which a forward pass runs.
        norm: The bound `grad_norm`.
        runtime: The run.
    """
    parallel, scale, family = state.parallel, state.loss_scale.value, mean.family
    counted_batch = mean.batch(mean.count(batch), share=scale)
    counted = float((counted_batch[family.losses[0].weight] > 0).sum())
    parallel.zero_grad()
    del counted_batch[family.targets]
    parallel.run([counted_batch], 1, context)
    parallel.gradients()
    square, num_tokens, *excluded = all_reduce_scalars(
        runtime, parallel.squared_grad_norm(norm), counted, *mean.excluded
    )
    if math.isfinite(square) and num_tokens:
        scale *= mean.divisors(excluded, runtime.rank.world_size)[0]
        state.optimizer.update_hessian(num_tokens / scale**2)
    runtime.device.step_boundary()
