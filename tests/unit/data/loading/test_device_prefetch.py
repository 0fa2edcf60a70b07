"""Micro-batches on the way to a device: queued ahead, in order with the computation."""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmcore.base.errors import DataError
from lmcore.data.loading.device_prefetch import (
    BatchCopier,
    CopiedAhead,
    copies_ahead,
    prefetch_to_device,
)
from lmcore.data.loading.loader import BatchLoader


class Counting:
    """Sample i is i, i + 1, ...; a mark breaks one."""

    def __init__(self, count: int = 20, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        if i == self.broken:
            raise DataError("sample 3 is damaged")
        return np.arange(i, i + 5, dtype=np.int64)


class Device:
    """A device that writes down what is queued; its memory is the host's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **lacking: None) -> None:
        self.log: list[str] = []
        self.torch_device = torch.device("cpu")
        self.done = False
        self.num_events = 0
        abilities = {"new_stream": self.stream, "new_event": self.event, "pin_memory": Tensor.clone}
        self.__dict__ |= abilities | lacking
        computing = SimpleNamespace(name="main", wait_event=lambda one: self.note("wait", one))
        monkeypatch.setattr("torch.accelerator.current_stream", lambda where: computing)
        real_empty, real_copy = torch.empty_like, Tensor.copy_

        def empty_like(tensor: Tensor, **options: Any) -> Tensor:
            self.log.append("allocate")
            return real_empty(tensor, **options)

        def copy_(tensor: Tensor, source: Tensor, **options: Any) -> Tensor:
            self.log.append(f"copy {int(source[0, 0])}")
            return real_copy(tensor, source, **options)

        monkeypatch.setattr(torch, "empty_like", empty_like)
        monkeypatch.setattr(Tensor, "copy_", copy_)

    def require(self, ability: str) -> Any:
        return getattr(self, ability)

    def note(self, what: str, about: Any) -> None:
        self.log.append(f"{what} {about.name}")

    def stream(self) -> Any:
        class Stream:
            name = "side"

            def wait_event(stream, event: Any) -> None:  # noqa: N805
                self.log.append(f"side waits {event.name}")

            def __enter__(stream) -> None:  # noqa: N805
                self.log.append("side on")

            def __exit__(stream, *raised: object) -> None:  # noqa: N805
                self.log.append("side off")

        return Stream()

    def event(self) -> Any:
        name = f"event {self.num_events}"
        self.num_events += 1
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.log.append(f"record {name} on {stream.name}"),
            query=lambda: self.done,
        )


class SameAs:
    """Value that is equal to a tensor of these numbers."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __eq__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.tolist() == self.numbers

    __hash__ = None  # type: ignore[assignment]


def full(loader: BatchLoader) -> None:
    """Wait until the loader has all that it may hold."""
    end = time.monotonic() + 60
    while not loader._ready.full() and time.monotonic() < end:
        time.sleep(0.005)


def test_each_is_copied_while_the_one_before_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is queued beside the computation, which waits only for its batch's copy.

    The computation's stream allocates the memory, and the copy waits for what was queued there:
    memory that an earlier batch had may still be read.
    """
    device: Any = Device(monkeypatch)
    with BatchLoader(Counting(), micro_batch_size=2, prefetch=2) as loader:
        batches = prefetch_to_device(loader, device)
        full(loader)
        first = next(batches)
        assert first["tokens_BS"][:, 0].tolist() == [0, 1]
        allocation = ["allocate"] * 3
        assert device.log == [
            *(*allocation, "record event 0 on main", "side waits event 0"),
            *("side on", "copy 0", "copy 1", "copy 1", "side off", "record event 1 on side"),
            "wait event 1",
            *(*allocation, "record event 2 on main", "side waits event 2"),
            *("side on", "copy 2", "copy 3", "copy 1", "side off", "record event 3 on side"),
        ]
        device.log.clear()
        full(loader)
        assert next(batches)["tokens_BS"][:, 0].tolist() == [2, 3]
        assert device.log[:2] == ["wait event 3", "allocate"]
        assert device.log[7] == "copy 4"


def test_all_batches_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the loader's, none left out or repeated, with the time that it waited."""
    device: Any = Device(monkeypatch)
    with BatchLoader(Counting(), micro_batch_size=3) as loader:
        batches = prefetch_to_device(loader, device)
        assert batches is not loader
        found = [batch["tokens_BS"][:, 0].tolist() for batch in batches]
        assert batches.wait_seconds == loader.wait_seconds
    assert found == [[i, i + 1, i + 2] for i in range(0, 18, 3)]


def test_host_memory_stays_until_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host memory of a copy is released when the copy is done."""
    device: Any = Device(monkeypatch)
    with BatchLoader(Counting(), micro_batch_size=2) as loader:
        batches: Any = prefetch_to_device(loader, device)
        for _ in range(3):
            next(batches)
        assert len(batches._copier._running) >= 3
        device.done = True
        next(batches)
        full(loader)
        next(batches)
        assert len(batches._copier._running) <= 1


def test_an_error_comes_with_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches before a damaged sample are given out; then it is raised, as often as asked."""
    device: Any = Device(monkeypatch)
    with BatchLoader(Counting(broken=5), micro_batch_size=2) as loader:
        batches = prefetch_to_device(loader, device)
        loader._thread.join()
        assert [next(batches)["tokens_BS"][0, 0].item() for _ in range(2)] == [0, 2]
        for _ in range(2):
            with pytest.raises(DataError, match="damaged"):
                next(batches)


@pytest.mark.parametrize("ability", ["new_stream", "new_event", "pin_memory"])
def test_a_device_without_queues(monkeypatch: pytest.MonkeyPatch, ability: str) -> None:
    """The loader itself is used for a device that lacks an ability."""
    device: Any = Device(monkeypatch, **{ability: None})
    with BatchLoader(Counting(), micro_batch_size=2) as loader:
        assert prefetch_to_device(loader, device) is loader


def test_any_structure_is_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch is read, pinned and queued before the one before it is given out."""
    device: Any = Device(monkeypatch)
    read: list[int] = []

    def batches() -> Iterator[Any]:
        for number in range(3):
            read.append(number)
            yield {"x": [torch.full((1, 2), number)], "name": f"batch {number}"}

    ahead = CopiedAhead(batches(), BatchCopier(device, pins=True))
    assert next(ahead) == {"x": [SameAs([[0, 0]])], "name": "batch 0"}
    assert read == [0, 1]
    assert [line for line in device.log if line.startswith("copy")] == ["copy 0", "copy 1"]
    assert device.log.index("wait event 1") < device.log.index("copy 1")
    assert [batch["x"][0].tolist() for batch in ahead] == [[[1, 1]], [[2, 2]]]
    assert next(ahead, "the end") == "the end"


def test_batches_that_are_none_or_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch without tensors is given out as it is; a tensor on the device is not copied."""
    device: Any = Device(monkeypatch)
    device.torch_device = torch.device("meta")
    there = torch.empty(2, device="meta")
    copies = BatchCopier(device, pins=True)
    assert list(CopiedAhead(iter([None, "text", (there, 1)]), copies)) == [None, "text", (there, 1)]
    assert not any(line == "allocate" for line in device.log)


def test_an_error_is_raised_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch before it is given out first, and the iterator continues after the error."""
    device: Any = Device(monkeypatch)
    numbers = map(functools.partial(operator.floordiv, 1), [1, 0, 1])
    ahead = CopiedAhead(numbers, BatchCopier(device, pins=True))
    assert next(ahead) == 1
    with pytest.raises(ZeroDivisionError):
        next(ahead)
    assert next(ahead) == 1
    assert copies_ahead(device)
    device.new_event = None
    assert not copies_ahead(device)


def test_memory_of_a_loop_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of copies in flight stays until they are done, also without the loop's iterator."""
    device: Any = Device(monkeypatch)
    ahead = CopiedAhead(iter(torch.ones(3, 1, 1)), BatchCopier(device, pins=True))
    next(ahead)
    in_flight = [weakref.ref(copy.on_device) for copy in ahead._copier._running]
    del ahead
    assert len(in_flight) == 2
    assert all(memory() is not None for memory in in_flight)
    device.done = True
    next(CopiedAhead(iter(torch.ones(1, 1, 1)), BatchCopier(device, pins=True)))
    assert all(memory() is None for memory in in_flight)


def test_next_if_ready() -> None:
    """A loader returns a ready batch or None, and counts the batches left."""
    with BatchLoader(Counting(4), micro_batch_size=2, prefetch=1) as loader:
        full(loader)
        batch = loader.next_if_ready()
        assert batch is not None
        assert len(loader) == 1
        assert next(loader)["tokens_BS"][0, 0] == 2
        assert loader.next_if_ready() is None


def test_begin_runs_in_the_thread() -> None:
    """The function *begin* is called first in the thread, and its error is the loader's."""
    import threading

    seen: list[str] = []
    with BatchLoader(
        Counting(), micro_batch_size=2, begin=lambda: seen.append(threading.current_thread().name)
    ) as loader:
        next(loader)
    assert seen == ["lmcore-data"]

    def fail() -> None:
        raise DataError("no device")

    loader = BatchLoader(Counting(), micro_batch_size=2, begin=fail)
    with loader, pytest.raises(DataError, match="no device"):
        next(loader)
