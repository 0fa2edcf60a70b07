"""Data parallelism: processes that hold the same weights and see different samples.

The model knows nothing of it: `replicate` wraps its loss with torch's `DistributedDataParallel`,
which averages gradients over the processes while backward still runs.  With one process nothing
is wrapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["DataParallel", "ReplicatedLoss"]

ReplicatedLoss = Callable[..., Tensor]
"""What computes the loss of a micro-batch from the arguments of `GPT.loss`."""


class DataParallel:
    """This process among those that share the samples of a step.

    Attributes:
        rank: Which slice of the samples is this process's.
        size: Processes that share them.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Read the process's place; all processes of a run share its samples."""
        self.rank, self.size = runtime.rank.rank, runtime.rank.world_size
        self._device = runtime.device.torch_device

    def replicate(self, model: Any) -> ReplicatedLoss:
        """Return the loss of *model*, whose gradients will be means over all processes.

        All processes must call it; the weights of rank 0 become those of all.

        Args:
            model: A module on this process's device, with a method `loss`.
        """
        if self.size == 1:
            loss: ReplicatedLoss = model.loss
            return loss
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(_Loss(model), gradient_as_bucket_view=True)

    @staticmethod
    def accumulating(loss: ReplicatedLoss, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward.

        Gradients are exchanged in that of the last one of a step alone.

        Args:
            loss: What `replicate` returned.
            last: Whether this is the last micro-batch of a step.
        """
        no_sync = getattr(loss, "no_sync", None)
        if last or no_sync is None:
            return contextlib.nullcontext()
        context: AbstractContextManager[None] = no_sync()
        return context

    def total(self, *values: float) -> list[float]:
        """Return the sum of each number over all processes, in float32; all must call it."""
        if self.size == 1:
            return list(values)
        from torch import distributed

        shared = torch.tensor(values, dtype=torch.float32, device=self._device)
        distributed.all_reduce(shared)
        found: list[float] = shared.tolist()
        return found

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return every process's tensor, in the order of ranks, on the host; all must call it.

        Args:
            values: Of the same shape and dtype in all processes, on the host.
        """
        if self.size == 1:
            return [values]
        from torch import distributed

        own = values.to(self._device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own)
        return [one.cpu() for one in found]


class _Loss(nn.Module):
    """A model whose forward is its loss, which is what gradients start from."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        loss: Tensor = self.model.loss(*arguments, **options)
        return loss
