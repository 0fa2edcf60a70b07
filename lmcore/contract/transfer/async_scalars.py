"""Asynchronous scalars: numbers of a step, copied to the host while the device keeps computing.

Reading a loss at once makes the host wait for the device, and the device then waits until the host
has queued more work.  Here the copy is queued with the step, and the host reads the numbers after
it has queued the next step.  A lazy device computes them at a boundary, without being waited for;
the host then copies them when it reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lmcore.contract.device import Device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AsyncScalars", "ScalarCopier", "supports_async_scalars"]


class ScalarCopier:
    """Queues copies of scalars to pinned memory; buffers are used again after they were read."""

    def __init__(self, device: Device) -> None:
        """Copy from *device*, which must be lazy, or have events and pinned memory."""
        self._is_lazy = _is_lazy(device)
        if not self._is_lazy:
            self._pin = device.require("pin_memory")
            self._new_event = device.require("new_event")
        self._free: list[Tensor] = []

    def copy(self, values: Tensor) -> AsyncScalars:
        """Queue the copy of *values*, a 1-D tensor on the device."""
        if self._is_lazy:
            return AsyncScalars(values, None, [])
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
    """Scalars on their way to the host; to be read once.

    Args:
        buffer: Tensor that has them when the copy is done.
        copied: Event after the copy; None if there is none, and to read waits.
        free: Buffers that can be used again; the buffer is added when it was read.
    """

    def __init__(self, buffer: Tensor, copied: Any | None, free: list[Tensor]) -> None:
        self._buffer, self._copied, self._free = buffer, copied, free

    def ready(self) -> bool | None:
        """Return True if the copy is done; None if the device does not tell."""
        return None if self._copied is None else bool(self._copied.query())

    def read(self) -> list[float]:
        """Return the numbers; waits for their copy only, not for work that was queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._buffer.tolist()
        self._free.append(self._buffer)
        return values


def supports_async_scalars(device: Device) -> bool:
    """Return True if *device* is lazy, or has the events and pinned memory that copies need."""
    return _is_lazy(device) or (device.new_event is not None and device.pin_memory is not None)


def _is_lazy(device: Device) -> bool:
    return device.step_boundary is not Device.step_boundary
