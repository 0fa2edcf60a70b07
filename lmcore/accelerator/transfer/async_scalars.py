"""Asynchronous scalars: numbers of a step, copied to the host while the device keeps computing.

Reading a loss at once makes the host wait for the device, and the device then waits until the host
has queued more work.  Here the copy is queued with the step, and the host reads the numbers after
it has queued the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.accelerator.device import Device

__all__ = ["AsyncScalars", "ScalarCopier", "supports_async_scalars"]


class ScalarCopier:
    """Queues copies of scalars to pinned memory; buffers are used again after they were read."""

    def __init__(self, device: Device) -> None:
        """Copy from *device*, which must have events and pinned memory."""
        self._pin = device.require("pin_memory")
        self._new_event = device.require("new_event")
        self._free: list[Tensor] = []

    def copy(self, values: Tensor) -> AsyncScalars:
        """Queue the copy of *values*, a 1-D tensor on the device."""
        buffer = self._buffer(values)
        buffer.copy_(values, non_blocking=True)
        copied = self._new_event()
        copied.record()
        return AsyncScalars(buffer, copied, self._free)

    def _buffer(self, values: Tensor) -> Tensor:
        for index, buffer in enumerate(self._free):
            if buffer.shape == values.shape and buffer.dtype == values.dtype:
                return self._free.pop(index)
        new: Tensor = self._pin(torch.empty(values.shape, dtype=values.dtype, device="cpu"))
        return new


class AsyncScalars:
    """Scalars on their way to the host; to be read once."""

    def __init__(self, buffer: Tensor, copied: Any, free: list[Tensor]) -> None:
        self._buffer, self._copied, self._free = buffer, copied, free

    def ready(self) -> bool:
        """Return True if the copy is done."""
        done: bool = self._copied.query()
        return done

    def read(self) -> list[float]:
        """Return the numbers; waits for their copy only, not for work that was queued later."""
        self._copied.synchronize()
        values: list[float] = self._buffer.tolist()
        self._free.append(self._buffer)
        return values


def supports_async_scalars(device: Device) -> bool:
    """Return True if *device* has the events and pinned memory that asynchronous copies need."""
    return device.new_event is not None and device.pin_memory is not None
