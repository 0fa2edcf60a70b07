"""Check of losses and gradient norms of a user's loop for NaN and infinity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lmcore.accelerator.async_scalars import ScalarCopier, supports_async_scalars
from lmcore.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.accelerator.async_scalars import AsyncScalars
    from lmcore.accelerator.device import Device

__all__ = ["FiniteCheck"]


class FiniteCheck:
    """Check for numbers that are NaN or infinite, without making an asynchronous device wait."""

    def __init__(self, device: Device) -> None:
        self._at_once = device.type == "cpu"
        self._copier = None
        if not self._at_once and supports_async_scalars(device):
            self._copier = ScalarCopier(device)
        self._copied: tuple[int, AsyncScalars] | None = None

    def check_loss(self, loss: Tensor) -> None:
        """Check the loss of a device that computes at once, before its backward pass.

        Raises:
            RunError: The loss is not finite.
        """
        if self._at_once and not math.isfinite(value := loss.item()):
            raise RunError(
                f"the loss is {value}",
                why="backward is not run: the weights are unchanged",
                hint="look at the batch and the learning rate, or skip the batch on all ranks",
            )

    def check_norm(self, norm: Tensor, update: int) -> None:
        """Check a gradient norm at once, or one of an earlier update whose copy has arrived.

        Args:
            norm: Norm, a scalar on the device.
            update: Number of the update.

        Raises:
            RunError: It is not finite.
        """
        if self._at_once:
            if not math.isfinite(value := norm.item()):
                raise _non_finite(value, update, "the weights are not updated")
        elif self._copier is not None:
            if self._copied is None:
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
                raise _non_finite(value, update, "the weights are lost since that update")


def _non_finite(norm: float, update: int, consequence: str) -> RunError:
    return RunError(
        f"the gradient norm of update {update} is {norm}",
        why=f"the loss or a gradient is NaN or infinite; {consequence}",
        hint="use a lower learning rate or a warm-up; continue from a checkpoint by `rt.load`",
    )
