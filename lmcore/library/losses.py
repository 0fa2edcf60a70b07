"""Losses of a user's loop: their weights, and the check that they are finite.

The gradients are of the weighted mean over the micro-batches and ranks of an update.  The loss
of each micro-batch is its own mean, and its weight the number of targets in it.  The weights of
other ranks and of later micro-batches are not known yet: `backward` multiplies the loss by its
weight, and `step` divides the gradients by the sum of all weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import ConfigError, RunError
from lmcore.contract.transfer.async_scalars import ScalarCopier, supports_async_scalars
from lmcore.library.exchange import all_reduce

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore.contract.transfer.async_scalars import AsyncScalars
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


_Error = Callable[[float, int, str], RunError | None]
"""Function of a number, its update and the consequence of a wrong one, which returns the error."""


class FiniteCheck:
    """Check for numbers that spoil an update, without making an asynchronous device wait."""

    def __init__(self, device: Device) -> None:
        self._is_host = device.type == "cpu"
        is_async = not self._is_host and supports_async_scalars(device)
        self._copier = ScalarCopier(device) if is_async else None
        self._copied: dict[_Error, tuple[int, AsyncScalars]] = {}

    def check_loss(self, loss: Tensor) -> None:
        """Check a loss on the CPU, before its backward pass.

        Raises:
            RunError: The loss is not finite.
        """
        if self._is_host and not math.isfinite(value := loss.item()):
            raise RunError(
                f"the loss is {value}",
                why="backward is not run: the weights are unchanged",
                hint="look at the batch and the learning rate, or skip the batch on all ranks",
            )

    def check_norm(self, norm: Tensor, update: int) -> None:
        """Check a gradient norm, or a norm of an earlier update whose copy has arrived.

        It is checked at once on the CPU, and on a device without asynchronous copies.

        Args:
            norm: Norm, a scalar on the device.
            update: Number of the update.

        Raises:
            RunError: It is not finite.
        """
        self._check(_non_finite, norm, update)

    def check_weight(self, total: Tensor, update: int, *, waits: bool) -> None:
        """Check a sum of weights, as a norm is checked.

        Args:
            total: Sum of the weights of an update, a scalar on the device.
            update: Number of the update.
            waits: True to check it at once, on every device.

        Raises:
            RunError: It is 0, negative or not finite.
        """
        self._check(_no_weight, total, update, waits=waits)

    def _check(self, error_of: _Error, number: Tensor, update: int, *, waits: bool = False) -> None:
        """Check a number with the function that returns its error; None if it is right."""
        if self._copier is None or waits:
            error = error_of(number.item(), update, "the weights are not updated")
            if error is not None:
                raise error
        elif error_of not in self._copied:
            self._copied[error_of] = update, self._copier.copy(number.reshape(1))
        elif self._copied[error_of][1].ready() is not False:
            # A lazy device does not tell; it has run an earlier update since.
            self._check_copied(error_of)

    def check_copied(self) -> None:
        """Check the numbers that were copied last, if any; waits for the copies.

        Raises:
            RunError: One is wrong.
        """
        for error_of in tuple(self._copied):
            self._check_copied(error_of)

    def _check_copied(self, error_of: _Error) -> None:
        update, scalars = self._copied.pop(error_of)
        (value,) = scalars.read()
        lost = "the weights are lost since that update or one shortly before it"
        error = error_of(value, update, lost)
        if error is not None:
            raise error

    def drop_copied(self) -> None:
        """Leave the numbers that were copied last unchecked: a checkpoint replaces the weights."""
        for _, scalars in self._copied.values():
            scalars.read()
        self._copied.clear()


def _non_finite(norm: float, update: int, consequence: str) -> RunError | None:
    if math.isfinite(norm):
        return None
    return RunError(
        f"the gradient norm of update {update} is {norm}",
        why=f"the loss or a gradient is NaN or infinite; {consequence}",
        hint="use a lower learning rate or a warm-up; continue from a checkpoint by `rt.load`",
    )


def _no_weight(total: float, update: int, consequence: str) -> RunError | None:
    if 0 < total < math.inf:
        return None
    return RunError(
        f"the weights of all losses of update {update} together are {total:g}",
        why=f"no target counts on any rank, so that there is no mean; {consequence}",
        hint="look at the masks of the data, or skip the update on all ranks",
    )
