"""Prefetch of micro-batches to the device: each is copied while the one before is computed.

Copies run from pinned memory on their own stream, so that neither the host nor the computation
waits for them; an event orders each copy before the computation that uses it.  The computation's
stream allocates the memory, and the copy waits for the work that was queued there before: memory of
an earlier batch is then reused in order, without `Tensor.record_stream`, which not every device
has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.data.loading.batch import Batch
    from lmcore.data.loading.loader import BatchLoader

__all__ = ["Batches", "prefetch_to_device"]


class Batches(Protocol):
    """Iterator over micro-batches that measures the time spent waiting for them."""

    @property
    def wait_seconds(self) -> float:
        """Total time that the consumer spent waiting for data, in seconds."""

    def __iter__(self) -> Iterator[Batch]:
        """Return the iterator."""

    def __next__(self) -> Batch:
        """Return the next micro-batch."""


def prefetch_to_device(loader: BatchLoader, device: Device) -> Batches:
    """Return an iterator over the loader's micro-batches, copied to *device* in advance.

    If the device has no streams, events or pinned memory, it is the loader itself, whose batches
    stay on the host.

    Args:
        loader: Loader of batches in pinned memory; the caller closes it.
        device: Device of this process.
    """
    wanted = ("new_stream", "new_event", "pin_memory")
    if any(getattr(device, ability) is None for ability in wanted):
        return loader
    return _DeviceBatches(loader, device)


@dataclass(frozen=True)
class _Copy:
    """Batch that is being copied.

    Attributes:
        host: Batch in pinned memory.
        on_device: Batch on the device.
        done: Event that the copy stream records after the copy.
    """

    host: Batch
    on_device: Batch
    done: Any


class _DeviceBatches:
    def __init__(self, loader: BatchLoader, device: Device) -> None:
        self._loader, self._device = loader, device
        self._torch_device = device.torch_device
        self._new_event = device.require("new_event")
        self._stream = device.require("new_stream")()
        self._next: _Copy | None = None
        self._running: deque[_Copy] = deque()  # keeps the host memory until it was read

    @property
    def wait_seconds(self) -> float:
        return self._loader.wait_seconds

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        copy = self._next or self._start_copy(next(self._loader))
        self._next = None
        self._compute_stream().wait_event(copy.done)
        ready = self._loader.next_if_ready()
        if ready is not None:
            self._next = self._start_copy(ready)
        return copy.on_device

    def _start_copy(self, host: Batch) -> _Copy:
        """Queue the copy of a batch, and release host memory of copies that are done."""
        while self._running and self._running[0].done.query():
            self._running.popleft()
        on_device = host.map(self._allocate)
        allocated = self._new_event()
        allocated.record(self._compute_stream())
        self._stream.wait_event(allocated)
        with self._stream:
            on_device.copy_(host)
        done = self._new_event()
        done.record(self._stream)
        copy = _Copy(host, on_device, done)
        self._running.append(copy)
        return copy

    def _compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self._torch_device)

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self._torch_device)
