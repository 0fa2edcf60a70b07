"""Validation: the mean loss over samples that training never sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmcore.data.loader import BatchLoader
from lmcore.train.step import HINT, NotFiniteError, mean_loss

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.gpt_dataset import GPTDataset
    from lmcore.model.gpt import GPT
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
    model: GPT,
    dataset: GPTDataset,
    plan: RunPlan,
    runtime: Runtime,
    *,
    first_sample: int,
    stop: Callable[[], bool] = lambda: False,
) -> Validation | None:
    """Return the mean loss over `eval_iters` global batches, or None if *stop* says so.

    The random numbers of training are afterwards what they were before.

    Args:
        model: In training mode before and after.
        dataset: Validation samples.
        plan: Gives batch size and `eval_iters`.
        runtime: Where to compute.
        first_sample: Position in *dataset* of the first sample.
        stop: Asked before each batch; a run that was told to exit validates no further.

    Raises:
        NotFiniteError: The loss of a batch is NaN or infinite.
    """
    micro = plan.config.training.micro_batch_size
    wanted = plan.config.training.eval_iters * plan.global_batch_size
    losses: list[float] = []
    model.eval()
    try:
        with (
            runtime.rng.preserved(),
            BatchLoader(
                dataset,
                micro_batch_size=micro,
                consumed_samples=first_sample,
                total_samples=first_sample + wanted,
                prefetch=plan.config.data.num_prefetch,
                vocab_size=plan.vocab_size,
            ) as batches,
        ):
            for batch in batches:
                if stop():
                    return None
                with runtime.precision.context():
                    loss = float(mean_loss(model, batch, runtime.device.torch_device))
                if not math.isfinite(loss):
                    raise _not_finite(loss, first_sample + len(losses) * micro)
                losses.append(loss)
    finally:
        model.train()
    return Validation(sum(losses) / len(losses), len(losses) * micro)


def _not_finite(loss: float, sample: int) -> NotFiniteError:
    return NotFiniteError(
        f"the validation loss is {loss} at validation sample {sample}",
        why="the last steps moved the weights too far; they are not saved",
        hint=HINT,
    )
