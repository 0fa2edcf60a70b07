"""`TokenMean`: mean loss over the valid targets of a global batch, whatever its micro-batches are.

A target is valid if its loss weight is not 0.  Micro-batches run one by one, on different ranks,
and none knows how many targets of the others are valid.  So each divides its loss by its number of
positions, as if all targets were valid; the sums of loss and gradients are then too small by one
factor, the share of the valid targets in the global batch.  It is known at the end of the step,
together with the gradient norm, and loss and gradients are divided by it.  Without masked targets
it is exactly 1.

A family with several losses sums means over different targets: no one factor corrects the gradient
at the end.  The micro-batches of a step are then counted before the first one runs.

With `--no-calculate-per-token-loss` each micro-batch divides by its own number of valid targets
instead, and the loss is the mean of these means.  Context-parallel parts of a sequence are no
micro-batches: weights are computed before a sequence is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.base.errors import DataError
from lmcore.model.family import family_of
from lmcore.parallel.scalar_collectives import all_reduce_scalars_on_device

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.batch import Batch
    from lmcore.model.family import Family
    from lmcore.runtime.runtime import Runtime

__all__ = ["TokenMean", "may_mask_targets", "mean_loss", "no_valid_target", "weighted"]

_EXACT_COUNTS = 2**24
"""Up to this count float32, in which counts are summed, represents each integer."""
_SMALLEST = torch.finfo(torch.float32).tiny
"""Least divisor, whose reciprocal is finite in float32: without a valid target gradients stay 0."""


def weighted(
    batch: Batch,
    family: Family,
    *,
    share: float = 1.0,
    divisors: Sequence[float | Tensor] | None = None,
) -> Batch:
    """Return a micro-batch whose loss weights give *share* times the mean of each loss.

    Args:
        batch: Tensors by the names of *family*, on the device.
        family: Family of the model.
        share: Factor of the losses, such as 1 / number of micro-batches.
        divisors: Number by which each loss is divided; None: the sum of the batch's weights of the
            loss, for the mean over the batch.
    """
    found = dict(batch)
    for number, loss in enumerate(family.losses):
        weight = batch[loss.weight]
        if divisors is None:
            total = _or_one(weight.sum())
        elif isinstance(divisor := divisors[number], Tensor):
            total = divisor.to(weight.dtype)
        else:
            total = weight.new_full((), divisor)
        found[loss.weight] = weight * (share / total)
    return found


def mean_loss(
    loss: Callable[..., Tensor], batch: Batch, family: Family, device: torch.device
) -> Tensor:
    """Return the mean loss over a batch, with the batch's loss weights.

    Args:
        loss: Loss function of a model on *device*, which takes the tensors by name.
        batch: Tensors by the names of *family*, on the host or the device.
        family: Family of the model.
        device: Device to compute on.
    """
    return loss(**weighted(_on_device(batch, device), family)).sum()


def may_mask_targets(plan: RunPlan) -> bool:
    """Return True if targets of a run may be masked; without masks, both means are the same."""
    if plan.shape.task:
        return False
    every_target = family_of(plan.shape).every_position_is_a_target
    return plan.config.data.eod_mask_loss or not every_target


class TokenMean:
    """Loss weights of the micro-batches of a step or validation, and the share of valid targets.

    Attributes:
        family: Family of the model.
        excluded: For each loss, the weight that the targets of this rank's micro-batches lack to 1
            each, to be summed over all ranks: the number of masked targets.
    """

    def __init__(self, plan: RunPlan, family: Family, device: torch.device) -> None:
        """Begin with no micro-batch.

        Args:
            plan: The run.
            family: Family of the model.
            device: Device to compute on.
        """
        self.family = family
        self.excluded: list[Tensor | float] = [0.0 for _ in family.losses]
        self._positions = [0 for _ in family.losses]
        # A micro-batch of samples that only fill up a task's validation has no mean.
        self._per_token = plan.config.training.calculate_per_token_loss or bool(plan.shape.task)
        self._device = device
        self._shares: list[Tensor] | None = None

    def count(self, batch: Batch) -> Batch:
        """Count the targets of a micro-batch; return the batch, on the device."""
        batch = _on_device(batch, self._device)
        for number, loss in enumerate(self.family.losses):
            weight = batch[loss.weight]
            self.excluded[number] = self.excluded[number] + (weight.numel() - weight.sum())
            self._positions[number] += weight.numel()
        return batch

    def take(self, batches: Iterator[Batch], count: int, runtime: Runtime) -> Iterator[Batch]:
        """Count the micro-batches of a step before any of them runs; all ranks must call it.

        The weights of `batch` then give the mean over the valid targets: `divisor` is 1.

        Args:
            batches: Micro-batches of this rank.
            count: Number of micro-batches of the step.
            runtime: The run.
        """
        taken = [self.count(next(batches)) for _ in range(count)]
        if self._per_token:
            sums = all_reduce_scalars_on_device(runtime, *self.excluded)
            ranks = runtime.rank.world_size
            self._shares = [
                _or_one(self._share(excluded, positions * ranks))
                for excluded, positions in zip(sums.unbind(), self._positions, strict=True)
            ]
        return iter(taken)

    def batch(self, batch: Batch, *, share: float = 1.0) -> Batch:
        """Return a counted micro-batch with the loss weights of its step; see `weighted`.

        Args:
            batch: Micro-batch, on the device.
            share: Factor of the losses, such as 1 / number of micro-batches.
        """
        if not self._per_token:
            return weighted(batch, self.family, share=share)
        divisors: list[float | Tensor] = [
            float(batch[loss.weight].numel()) for loss in self.family.losses
        ]
        if self._shares is not None:
            pairs = zip(divisors, self._shares, strict=True)
            divisors = [divisor * valid for divisor, valid in pairs]
        return weighted(batch, self.family, share=share, divisors=divisors)

    def has_targets(self, excluded: Sequence[float], ranks: int) -> bool:
        """Return True if any target is valid.

        Args:
            excluded: Sums of `excluded` over all ranks.
            ranks: Number of ranks.
        """
        for masked, own in zip(excluded, self._positions, strict=True):
            positions = own * ranks
            rounding = 0.0 if positions <= _EXACT_COUNTS else positions * 4 / _EXACT_COUNTS
            if not positions - masked <= rounding:
                return True
        return False

    def divisors(self, excluded: Sequence[float], ranks: int) -> list[float]:
        """Return the number by which each loss is to be divided; 1 without masks.

        It is the same for the gradients of a family with one loss.

        Args:
            excluded: Sums of `excluded` over all ranks.
            ranks: Number of ranks.
        """
        if not self._per_token or self._shares is not None:
            return [1.0 for _ in excluded]
        pairs = zip(excluded, self._positions, strict=True)
        return [(own * ranks - masked) / (own * ranks) for masked, own in pairs]

    def divisor_on_device(self, excluded: Tensor, ranks: int) -> Tensor | None:
        """Return the divisor of gradients without waiting for the device; None if it is 1.

        Without a valid target it is not 0, so that gradients stay 0.

        Args:
            excluded: Sums of `excluded` over all ranks; their dtype is the result's.
            ranks: Number of ranks.
        """
        if not self._per_token or self._shares is not None:
            return None
        return self._share(excluded[0], self._positions[0] * ranks).clamp_(min=_SMALLEST)

    @staticmethod
    def _share(excluded: Tensor, positions: int) -> Tensor:
        return (positions - excluded) / positions


def _or_one(divisor: Tensor) -> Tensor:
    """Return a divisor of weights; 1 without a valid target, where all weights are 0."""
    return torch.where(divisor > 0, divisor, 1.0)


def _on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device; copies from pinned memory do not block the host."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def no_valid_target(where: str) -> DataError:
    """Return the error of samples whose targets are all masked.

    Args:
        where: The samples: "step 3, samples 32 to 47".
    """
    return DataError(
        f"no target counts in the loss of {where}",
        why="all of them are masked: there is nothing to learn or to measure",
        hint="`--eod-mask-loss` masks what follows an end-of-document token: leave it out, or look "
        "for empty documents by `lmcore data inspect`",
    )
