"""Weights of losses: gradients of the weighted mean over the micro-batches and ranks of an update.

The loss of each micro-batch is its own mean, and its weight the number of targets in it.  The
weights of other ranks and of later micro-batches are not known yet: `backward` multiplies the loss
by its weight, and `step` divides the gradients by the sum of all weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import ConfigError
from lmcore.library.exchange import all_reduce

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["LossWeights"]


class LossWeights:
    """Weights of the losses of the update in progress.

    Attributes:
        total: Sum of the weights of an update over all ranks, once it is complete; None if its
            losses have no weights.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Begin without an update.

        Args:
            runtime: Device and processes.
        """
        self.total: Tensor | None = None
        self._runtime = runtime
        self._own: Tensor | None = None  # sum of this rank's weights in the update
        self._unit: float | None = None  # a usual weight, by which all are divided
        self._steps = 1  # number by which each loss of the complete update was divided
        self._is_used = False  # True after a `backward` of the micro-batch
        self._is_weighted = False  # True if that `backward` had a weight

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch, which may have one `backward` with a weight."""
        self._is_used = self._is_weighted = False

    def apply(self, loss: Tensor, weight: Any, *, begins: bool) -> Tensor:
        """Return the loss times its weight, and count the weight.

        Args:
            loss: Scalar loss of a micro-batch.
            weight: Number, or tensor of one element, of 0 or more; None: the loss has no weight.
            begins: True for the first micro-batch of an update.

        Raises:
            ConfigError: The weight is something else, or losses of one update have weights and
                others none, or a micro-batch has a second loss.
        """
        if self._is_used and (weight is not None or self._is_weighted):
            raise ConfigError(
                "a second `backward` in one micro-batch, with a `weight`",
                why="the gradients of an update are divided by the sum of its weights",
                hint="add the losses of a micro-batch, and call `rt.backward` once",
            )
        self._is_used, self._is_weighted = True, weight is not None
        if begins:
            self._own = self.total = None
        elif (self._own is None) != (weight is None):
            raise ConfigError(
                "`backward` with a `weight` in some micro-batches of an update only",
                hint="give each `rt.backward` of the accumulation a weight, or none",
            )
        if weight is None:
            return loss
        value = self._checked(weight)
        if self._unit is None:
            unit = all_reduce(self._runtime, float(value), "mean")
            self._unit = unit if 0 < unit < math.inf else 1.0
        self._own = value if self._own is None else self._own + value
        # The mean of a micro-batch without targets is 0 / 0, and counts nothing.
        return torch.where(value > 0, loss, torch.zeros_like(loss)) * (value / self._unit)

    def complete(self, steps: int) -> None:
        """Sum the weights of a complete update over all ranks, which must all call it.

        Args:
            steps: Number by which each loss of the update was divided.
        """
        if self._own is None:
            return
        self._steps = steps
        self.total = self._own.clone()
        if self._runtime.processes is not None:
            from torch import distributed

            distributed.all_reduce(self.total)

    def factor(self) -> Tensor | None:
        """Return the factor of complete gradients, a scalar on the device; None without weights."""
        if self.total is None:
            return None
        assert self._unit is not None, "a weight was applied"
        number = self._unit * self._steps * self._runtime.rank.world_size
        # Without any weight gradients stay 0, until the check of the total is read.
        return torch.where(self.total > 0, number / self.total, torch.zeros_like(self.total))

    def _checked(self, weight: Any) -> Tensor:
        """Return a weight as a scalar in float32 on the device."""
        device = self._runtime.device.torch_device
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
            return weight.detach().reshape(()).to(device, torch.float32)
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if is_number and 0 <= weight < math.inf:
            return torch.full((), weight, dtype=torch.float32, device=device)
        shown = type(weight).__name__ if not is_number else repr(weight)
        if isinstance(weight, Tensor):
            shown = f"tensor {list(weight.shape)}"
        raise ConfigError(
            f"`backward(weight={shown})`: expected a number of 0 or more, or a tensor of one "
            "element",
            hint="it is the number of targets that the loss is the mean of",
        )
