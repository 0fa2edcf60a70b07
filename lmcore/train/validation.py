"""Validation: the mean loss over samples that training never sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmcore.data.loading.loader import BatchLoader
from lmcore.parallel.scalar_collectives import all_reduce_scalars
from lmcore.train.diagnose.non_finite import HINT, NonFiniteError
from lmcore.train.step import mean_loss

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.dataset.document_mask import DocumentMasks
    from lmcore.data.loading.loader import SampleSource
    from lmcore.parallel.parallel_model import ParallelModel
    from lmcore.runtime.runtime import Runtime

__all__ = ["Validation", "perplexity", "validate"]

_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class Validation:
    """A mean loss over a number of samples."""

    loss: float
    samples: int

    @property
    def perplexity(self) -> float:
        """exp(min(20, loss))."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """Return exp(min(20, loss)), as the family reports it."""
    return math.exp(min(_LARGEST_EXPONENT, loss))


@torch.no_grad()
def validate(
    parallel: ParallelModel,
    dataset: SampleSource,
    plan: RunPlan,
    runtime: Runtime,
    *,
    first_sample: int,
    masks: DocumentMasks | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Validation | None:
    """Return the mean loss over `eval_iters` global batches, or None if *stop* says so.

    All processes must call it; where *stop* says so in one of them all of them end.  The random
    numbers of training are afterwards what they were before.

    Args:
        parallel: In training mode before and after.
        dataset: Validation samples.
        plan: Gives batch size and `eval_iters`.
        runtime: Where to compute.
        first_sample: Position in *dataset* of the first sample.
        masks: What ends with a document inside a sample; None: nothing.
        stop: Asked before each batch; a run that was told to exit validates no further.

    Raises:
        NonFiniteError: The loss of a batch is NaN or infinite.
    """
    micro = plan.config.training.micro_batch_size
    wanted = plan.config.training.eval_iters * plan.global_batch_size
    data_rank, data_size = parallel.mesh.data_rank, plan.layout.data
    parallel.model.eval()
    try:
        with (
            runtime.rng.preserved(),
            BatchLoader(
                dataset,
                micro_batch_size=micro,
                consumed_samples=first_sample,
                total_samples=first_sample + wanted,
                data_parallel_rank=data_rank,
                data_parallel_size=data_size,
                prefetch=plan.config.data.num_prefetch,
                vocab_size=plan.vocab_size,
                masks=masks,
            ) as batches,
        ):
            losses, ended = _losses(parallel, batches, runtime, stop)
    finally:
        parallel.model.train()
    (total,) = all_reduce_scalars(runtime, sum(losses))
    if not math.isfinite(total):
        each = micro * data_size
        raise _non_finite(losses, first_sample + data_rank * micro, each)
    if ended:
        return None
    return Validation(parallel.total_loss(total) / len(losses), wanted)


def _losses(
    parallel: ParallelModel, batches: BatchLoader, runtime: Runtime, stop: Callable[[], bool]
) -> tuple[list[float], bool]:
    """Return this process's losses, and whether all ended before the last batch."""
    losses: list[float] = []
    for batch in batches:
        # All are asked before each batch: those that divide a model compute it together, and
        # would wait for one that has left.
        bad = bool(losses) and not math.isfinite(losses[-1])
        if all_reduce_scalars(runtime, float(bad or stop())) != [0.0]:
            return losses, True
        with runtime.precision.context():
            loss = float(mean_loss(parallel.loss, batch, runtime.device.torch_device))
        losses.append(loss)
    return losses, False


def _non_finite(losses: list[float], first: int, each: int) -> NonFiniteError:
    """Describe it by this process's *losses*, from sample *first* on, *each* samples apart."""
    why = "the last steps moved the weights too far; they are not saved"
    if not losses or math.isfinite(losses[-1]):
        return NonFiniteError("the validation loss of another process is not finite", why=why)
    sample = first + (len(losses) - 1) * each
    what = f"the validation loss is {losses[-1]} at validation sample {sample}"
    return NonFiniteError(what, why=why, hint=HINT)
