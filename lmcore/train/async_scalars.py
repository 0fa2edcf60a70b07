"""Numbers of a step that the device is still to compute: read later, and waited for no sooner.

A loss that is read at once has the host wait until the device has caught up with it, and then the
device wait until the host has queued more.  Here numbers are copied to the host in the device's own
time, and the host reads them when it has queued the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.accelerator.device import Device

__all__ = ["LateNumbers", "LateReader", "can_read_late"]


class LateReader:
    """Copies numbers to pinned memory, which is used again once they are read."""

    def __init__(self, device: Device) -> None:
        """Read from *device*, which has events and pinned memory."""
        self._pin = device.require("pin_memory")
        self._new_event = device.require("new_event")
        self._free: list[Tensor] = []

    def send(self, values: Tensor) -> LateNumbers:
        """Queue the copy of *values*, a row on the device."""
        host = self._buffer(values)
        host.copy_(values, non_blocking=True)
        there = self._new_event()
        there.record()
        return LateNumbers(host, there, self._free)

    def _buffer(self, values: Tensor) -> Tensor:
        for number, one in enumerate(self._free):
            if one.shape == values.shape and one.dtype == values.dtype:
                return self._free.pop(number)
        fresh: Tensor = self._pin(torch.empty(values.shape, dtype=values.dtype, device="cpu"))
        return fresh


class LateNumbers:
    """What `LateReader.send` has sent; to be read once."""

    def __init__(self, host: Tensor, there: Any, free: list[Tensor]) -> None:
        self._host, self._there, self._free = host, there, free

    def read(self) -> list[float]:
        """Return the numbers; waits for them, and for nothing that was queued after them."""
        self._there.synchronize()
        found: list[float] = self._host.tolist()
        self._free.append(self._host)
        return found


def can_read_late(device: Device) -> bool:
    """Return whether a device works on its own, and its numbers can be read later."""
    return device.new_event is not None and device.pin_memory is not None
