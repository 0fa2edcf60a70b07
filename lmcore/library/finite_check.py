"""Check of losses, gradient norms and sums of weights of a user's loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcore.base.errors import RunError
from lmcore.contract.transfer.async_scalars import ScalarCopier, supports_async_scalars

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.contract.device import Device
    from lmcore.contract.transfer.async_scalars import AsyncScalars

__all__ = ["FiniteCheck"]

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
