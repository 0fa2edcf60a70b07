"""Prefetch of batches to the device: each is copied while the one before is computed.

Copies run from pinned memory on their own stream, so that neither the host nor the computation
waits for them; an event orders each copy before the computation that uses it.  The computation's
stream allocates the memory, and the copy waits for the work that was queued there before: memory of
an earlier batch is then reused in order, without `Tensor.record_stream`, which not every device
has.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lmcore.data.loading.nested import map_tensors

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore.data.loading.batch import Batch
    from lmcore.data.loading.loader import BatchLoader

__all__ = ["BatchCopier", "Batches", "CopiedAhead", "copies_ahead", "prefetch_to_device"]


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
    return _DeviceBatches(loader, device) if copies_ahead(device) else loader


def copies_ahead(device: Device) -> bool:
    """Return True if the device can copy a batch while it computes with another one."""
    needed = ("new_stream", "new_event", "pin_memory")
    return all(getattr(device, ability) is not None for ability in needed)


@dataclass(frozen=True)
class _Copy:
    """Batch that is being copied.

    Attributes:
        on_device: Batch on the device.
        sources: Its tensors in pinned memory, which is kept until the copy was done.
        done: Event that the copy stream records after the copy.
    """

    on_device: Any
    sources: list[Tensor]
    done: Any


_abandoned: list[_Copy] = []
"""Copies in flight whose copier was dropped."""


class BatchCopier:
    """Copies of batches on a separate stream.

    Args:
        device: Device of this process, for which `copies_ahead` is True.
        pins: True if batches come in pageable memory, too, and are pinned first.
    """

    def __init__(self, device: Device, *, pins: bool) -> None:
        self._torch_device = device.torch_device
        self._pin = device.require("pin_memory") if pins else None
        self._new_event = device.require("new_event")
        self._stream = device.require("new_stream")()
        self._running: deque[_Copy] = deque()  # keeps the host memory until it was read

    def start(self, host: Any) -> _Copy:
        """Queue the copy of a batch, and release host memory of copies that are done."""
        while self._running and self._running[0].done.query():
            self._running.popleft()
        if _abandoned:
            _abandoned[:] = [copy for copy in _abandoned if not copy.done.query()]
        sources: list[Tensor] = []
        targets: list[Tensor] = []

        def allocate(tensor: Tensor) -> Tensor:
            if self._pin is not None:
                if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                    return tensor.to(self._torch_device)
                if tensor.device.type != "cpu":
                    return tensor.to(self._torch_device)  # the tensor itself, if it is there
                tensor = tensor if tensor.is_pinned() else self._pin(tensor)
            sources.append(tensor)
            targets.append(torch.empty_like(tensor, device=self._torch_device))
            return targets[-1]

        on_device = map_tensors(host, allocate, lambda movable: movable.to(self._torch_device))
        allocated = self._new_event()
        allocated.record(self._compute_stream())
        self._stream.wait_event(allocated)
        with self._stream:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        done = self._new_event()
        done.record(self._stream)
        copy = _Copy(on_device, sources, done)
        self._running.append(copy)
        return copy

    def result(self, copy: _Copy) -> Any:
        """Return the batch on the device; work that is queued from now on waits for the copy."""
        self._compute_stream().wait_event(copy.done)
        return copy.on_device

    def __del__(self) -> None:
        """Keep the memory of copies that are not done, of a loop that was left early."""
        with contextlib.suppress(Exception):  # the device has failed, or the interpreter ends
            _abandoned.extend(copy for copy in self._running if not copy.done.query())

    def _compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self._torch_device)


class _DeviceBatches:
    def __init__(self, loader: BatchLoader, device: Device) -> None:
        self._loader, self._copier = loader, BatchCopier(device, pins=False)
        self._next: _Copy | None = None

    @property
    def wait_seconds(self) -> float:
        return self._loader.wait_seconds

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        copy = self._next or self._copier.start(next(self._loader))
        self._next = None
        batch: Batch = self._copier.result(copy)
        ready = self._loader.next_if_ready()
        if ready is not None:
            self._next = self._copier.start(ready)
        return batch


class CopiedAhead:
    """Iterator over batches on the device; the next batch is read and copied one call ahead.

    An error of the next batch is raised when that batch is due.

    Args:
        batches: Iterator over batches on the host, of any nested structure.
        copier: Queue of copies that pins the batches.
    """

    def __init__(self, batches: Iterator[Any], copier: BatchCopier) -> None:
        self._batches, self._copier = batches, copier
        self._next: _Copy | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator."""
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        due, self._error = self._error, None
        if due is not None:
            raise due
        copy = self._next or self._copier.start(next(self._batches))
        self._next = None
        batch = self._copier.result(copy)
        try:
            self._next = self._copier.start(next(self._batches))
        except StopIteration:
            pass  # the next call reads again, and ends
        except Exception as error:  # noqa: BLE001  # raised with its batch
            self._error = error
        return batch
