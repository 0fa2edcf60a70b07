"""Check of losses and gradient norms of a user's loop for NaN and infinity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lmcore.accelerator.transfer.async_scalars import ScalarCopier, supports_async_scalars
from lmcore.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.accelerator.device import Device
    from lmcore.accelerator.transfer.async_scalars import AsyncScalars

__all__ = ["FiniteCheck"]


class FiniteCheck:
    """Check for numbers that are NaN or infinite, without making an asynchronous device wait."""

    def __init__(self, device: Device) -> None:
        self._is_host = device.type == "cpu"
        is_async = not self._is_host and supports_async_scalars(device)
        self._copier = ScalarCopier(device) if is_async else None
        self._copied: tuple[int, AsyncScalars] | None = None

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
        if self._copier is None:
            if not math.isfinite(value := norm.item()):
                raise _non_finite(value, update, "the weights are not updated")
        elif self._copied is None:
            self._copied = update, self._copier.copy(norm.reshape(1))
        elif self._copied[1].ready():
            self.check_copied()

    def check_copied(self) -> None:
        """Check the norm that was copied last, if any; waits for the copy.

        Raises:
            RunError: It is not finite.
        """
        if self._copied is not None:
            (update, scalars), self._copied = self._copied, None
            (value,) = scalars.read()
            if not math.isfinite(value):
                lost = "the weights are lost since that update or one shortly before it"
                raise _non_finite(value, update, lost)

    def drop_copied(self) -> None:
        """Leave the norm that was copied last unchecked: a checkpoint replaces the weights."""
        if self._copied is not None:
            self._copied[1].read()
            self._copied = None


def _non_finite(norm: float, update: int, consequence: str) -> RunError:
    return RunError(
        f"the gradient norm of update {update} is {norm}",
        why=f"the loss or a gradient is NaN or infinite; {consequence}",
        hint="use a lower learning rate or a warm-up; continue from a checkpoint by `rt.load`",
    )
