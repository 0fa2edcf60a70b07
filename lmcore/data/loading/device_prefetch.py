"""Micro-batches on their way to the device, each copied while the one before is computed with.

Copies are queued on a stream of their own, from pinned memory, so that neither the host nor the
computation waits for them; what is handed out is in order with the computation by an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.data.loading.loader import Batch, BatchLoader

__all__ = ["Batches", "prefetch_to_device"]


class Batches(Protocol):
    """Micro-batches, and the time that was spent waiting for them."""

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer spent waiting for data, in all."""

    def __iter__(self) -> Iterator[Batch]:
        """Return itself."""

    def __next__(self) -> Batch:
        """Return the next one."""


def prefetch_to_device(loader: BatchLoader, device: Device) -> Batches:
    """Return what gives the loader's micro-batches on *device*.

    Where that has no streams, events or pinned memory, the loader itself: its batches are on the
    host, and whoever uses them moves them.

    Args:
        loader: Its batches are in pinned memory; it is closed by its owner.
        device: This process's.
    """
    wanted = ("new_stream", "new_event", "pin_memory")
    if any(getattr(device, ability) is None for ability in wanted):
        return loader
    return _DeviceBatches(loader, device)


@dataclass(frozen=True)
class _Moving:
    """A batch that is being copied: where from, where to, and when it is there."""

    host: Batch
    moved: Batch
    there: Any


class _DeviceBatches:
    def __init__(self, loader: BatchLoader, device: Device) -> None:
        self._loader, self._device = loader, device
        self._where = device.torch_device
        self._new_event = device.require("new_event")
        self._stream = device.require("new_stream")()
        self._next: _Moving | None = None
        self._left: deque[_Moving] = deque()  # their host memory is still read from

    @property
    def wait_seconds(self) -> float:
        return self._loader.wait_seconds

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        moving = self._next or self._move(next(self._loader))
        self._next = None
        computing = torch.accelerator.current_stream(self._where)
        computing.wait_event(moving.there)
        for tensor in moving.moved.tensors():
            # It was made on the other stream, which may use its memory again as soon as it is
            # let go of: not before the computation is done with it.
            tensor.record_stream(computing)
        ahead = self._loader.next_if_ready()
        if ahead is not None:
            self._next = self._move(ahead)
        return moving.moved

    def _move(self, host: Batch) -> _Moving:
        """Queue the copy of a batch."""
        while self._left and self._left[0].there.query():
            self._left.popleft()
        with self._stream:
            moved = host.to(self._where)
        there = self._new_event()
        there.record(self._stream)
        moving = _Moving(host, moved, there)
        self._left.append(moving)
        return moving
