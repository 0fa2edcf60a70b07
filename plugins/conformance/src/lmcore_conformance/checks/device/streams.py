"""Level 1: queued work is finished after a wait, for the host and for other streams.

A wait that does nothing shows only if the work is still running when its result is read. So each
check queues products that take `_SECONDS`, measured by reads that wait by themselves, lets the
result arrive in pinned memory (a copy to pageable memory waits by itself, too), and reads at once;
memory has wrong numbers before. A right device passes in any case, however fast or slow it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore_conformance.registry import Failure, check

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__ = ["Products", "queued_products"]

_check = partial(check, level="L1", group="streams")

_TRIES = 3
_SECONDS = 0.025
_PRODUCT_SECONDS = 2e-4
_SMALLEST, _LARGEST = 128, 4096
_LANDING_BYTES = 4 * 2**20
_QUERY_SECONDS = 30
_NOTHING = -1.0
_AGAIN = "with an event that is recorded again, after all work before its first record is done: "


@dataclass(frozen=True)
class Products:
    """Products that take a while, with an exact result.

    Attributes:
        matrix_NN: a permutation on the device.
        right_NN: the result on the host.
        count: number of products.
    """

    matrix_NN: Tensor
    right_NN: Tensor
    count: int

    def run(self) -> Tensor:
        """Queue the products on the current stream."""
        x_NN = self.matrix_NN
        for _ in range(self.count):
            x_NN = x_NN @ self.matrix_NN
        return x_NN

    def new_result(self) -> Tensor:
        """Return memory on the device that has no result yet; it is ready for all streams."""
        result_NN = torch.full_like(self.matrix_NN, _NOTHING)
        result_NN.cpu()  # waits
        return result_NN


@lru_cache(maxsize=1)
def queued_products(bench: Bench) -> Products:
    """Return products that take the device `_SECONDS` together."""
    size = _SMALLEST
    while True:
        permutation_NN = torch.eye(size).roll(1, 0)
        matrix_NN = permutation_NN.to(bench.torch_device)
        few = Products(matrix_NN, permutation_NN, 8)
        few.run().cpu()
        best = min(_seconds(few) for _ in range(2)) / few.count
        if best >= _PRODUCT_SECONDS or size == _LARGEST:
            break
        size *= 2
    count = min(400, max(10, round(_SECONDS / best)))
    return Products(matrix_NN, torch.eye(size).roll(count + 1, 0), count)


def _seconds(products: Products) -> float:
    began = time.perf_counter()
    products.run().cpu()
    return time.perf_counter() - began


class _Landing:
    """Host memory for copies of a result: some MB, pinned if the device has pinned memory."""

    def __init__(self, bench: Bench, products: Products) -> None:
        size = len(products.right_NN)
        self._repeats = max(1, _LANDING_BYTES // (4 * size * size))
        memory_RNN = torch.full((self._repeats, size, size), _NOTHING)
        pin = bench.device.pin_memory
        self._memory_RNN = pin(memory_RNN) if pin is not None else memory_RNN
        self._right_NN = products.right_NN

    def send(self, result_NN: Tensor) -> None:
        """Queue a copy of a result on the current stream."""
        self._memory_RNN.fill_(_NOTHING)
        copies_RNN = result_NN.repeat(self._repeats, 1, 1)
        self._memory_RNN.copy_(copies_RNN, non_blocking=True)

    def has_right(self, factor: float = 1.0) -> bool:
        """Return True if the result, times *factor*, is there now."""
        there_RNN = self._memory_RNN.clone()
        return bool((there_RNN == self._right_NN * factor).all())


@_check(
    "device.synchronize",
    "After `synchronize` all queued work is finished, on all streams, and copies to pinned memory "
    "have arrived.",
    reason="Step times are measured and host copies made after it.",
)
def synchronize(bench: Bench) -> str:
    """Queue products and a copy on each of two streams; read after `synchronize` alone."""
    products = queued_products(bench)
    landing, other = (_Landing(bench, products) for _ in range(2))
    stream = bench.device.new_stream() if bench.device.new_stream is not None else None
    for _ in range(_TRIES):
        if stream is not None:
            with stream:
                other.send(products.run())
        landing.send(products.run())
        bench.device.synchronize()
        arrived = landing.has_right()
        arrived_on_stream = stream is None or other.has_right()
        _settle(products, stream)
        if not arrived:
            raise Failure(
                f"after `synchronize` the result of {products.count} queued products is not there "
                "yet, or wrong: it does not wait"
            )
        if not arrived_on_stream:
            raise Failure("after `synchronize` work on another stream is not finished")
    return _work(products)


@_check(
    "device.streams",
    "Work on a stream runs in order, and another stream that waits for it by `wait_stream` sees "
    "the result.",
    reason="Copies of batches and collectives overlap with computation on separate streams.",
    requires=["streams"],
)
def streams(bench: Bench) -> str:
    """Start work on one stream, continue it on another and again on the first; read the result."""
    make = bench.device.require("new_stream")
    products = queued_products(bench)
    first, second, current = make(), make(), torch.accelerator.current_stream()
    for number in range(1, _TRIES + 1):
        faults = _pass_back_and_forth(
            *(products, (first, second), float(number)),
            wait=lambda waiting, working: waiting.wait_stream(working),
        )
        current.wait_stream(first)
        current.wait_stream(second)
        _settle(products, first, second)
        if faults:
            raise Failure(*(f"`wait_stream` did not wait: {fault}" for fault in faults))
    return f"two streams, both ways; {_work(products)}"


def _pass_back_and_forth(
    products: Products,
    streams: tuple[Any, Any],
    factor: float,
    wait: Callable[[Any, Any], object],
) -> list[str]:
    """Compute on one stream, then on the other, then on the first; return wrong results.

    Each has different results in every try (*factor*), in memory that was written before.
    """
    first, second = streams
    one_NN, two_NN, three_NN = (products.new_result() for _ in range(3))
    with first:
        one_NN.copy_(products.run() * factor)
    wait(second, first)
    with second:
        read_NN = one_NN + 0
        two_NN.copy_(read_NN + products.run() * 0)
    wait(first, second)
    with first:
        three_NN.copy_(two_NN)
        found = three_NN.cpu()  # waits for the first stream
    with second:
        before = two_NN.cpu()
    right_NN = products.right_NN * factor
    faults = []
    if not torch.equal(before, right_NN):
        faults.append("the second stream read a result of the first before it was done")
    elif not torch.equal(found, right_NN):
        faults.append("the first stream read a result of the second before it was done")
    return faults


@_check(
    "device.stream-synchronize",
    "After `synchronize` on a stream, or once its `query` is true, its work is finished.",
    reason="The host then reads results of a side stream.",
    requires=["streams"],
)
def stream_synchronize(bench: Bench) -> str:
    """Queue products and a copy to the host on a stream; wait for the stream alone, or poll it."""
    stream = bench.device.require("new_stream")()
    products = queued_products(bench)
    landing = _Landing(bench, products)
    waits: dict[str, Callable[[], object]] = {
        "after `synchronize` of the stream": stream.synchronize,
        "once `query` of the stream is true": lambda: _poll("stream", stream.query),
    }
    for _ in range(_TRIES):
        for moment, wait in waits.items():
            with stream:
                landing.send(products.run())
            wait()
            arrived = landing.has_right()
            queried = stream.query()
            _settle(products, stream)
            if not arrived:
                raise Failure(f"{moment} its work is not finished")
            if not queried:
                raise Failure(f"{moment} its `query` is false")
    return _work(products)


@_check(
    "device.events",
    "An event is complete when all work before its last record is finished; a stream can wait for "
    "it by `wait_event`, the host by `synchronize` and `query`.",
    reason="Without events, overlap is either wrong or needs a full synchronization.",
    requires=["events", "streams"],
)
def events(bench: Bench) -> str:
    """Record on one stream, wait from another and from the host, in both directions; query.

    Each is done with new events, and again with an event for each stream, which the check records
    behind all work after it was recorded, and reached, before.
    """
    make_stream, make_event = (bench.device.require(n) for n in ("new_stream", "new_event"))
    products = queued_products(bench)
    landing = _Landing(bench, products)
    pair = make_stream(), make_stream()
    kept = {id(stream): make_event() for stream in pair}

    def recorded(stream: Any) -> Any:
        event = make_event()
        event.record(stream)
        return event

    def recorded_again(stream: Any) -> Any:
        event = kept[id(stream)]
        event.record(stream)
        return event

    for stream in pair:
        recorded_again(stream)
    _settle(products, *pair)
    for number in range(1, _TRIES + 1):
        for words, record in (("", recorded), (_AGAIN, recorded_again)):
            faults = _events_faults(products, landing, pair, float(number), record)
            _settle(products, *pair)
            if faults:
                raise Failure(*(f"{words}{fault}" for fault in faults))
    return f"recorded once and again, waited for both ways, queried; {_work(products)}"


def _events_faults(
    products: Products,
    landing: _Landing,
    streams: tuple[Any, Any],
    factor: float,
    record: Callable[[Any], Any],
) -> list[str]:
    """Wait in each way for events that *record* records on a stream; return what is wrong."""

    def wait(waiting: Any, working: Any) -> None:
        waiting.wait_event(record(working))

    faults = [
        f"`wait_event` did not wait: {fault}"
        for fault in _pass_back_and_forth(products, streams, factor, wait)
    ]
    first = streams[0]
    for moment, polls in (("after `synchronize`", False), ("once `query` is true", True)):
        with first:
            landing.send(products.run() * factor)
            event = record(first)
        _poll("event", event.query) if polls else event.synchronize()
        arrived = landing.has_right(factor)
        queried = event.query()
        _settle(products, first)
        if not arrived:
            faults.append(f"{moment} of an event, work before the event is not finished")
        if not queried:
            faults.append(f"`query` of an event is false {moment}")
    return faults


def _poll(name: str, query: Callable[[], bool]) -> None:
    """Call *query* until it is true.

    Raises:
        Failure: It stays false.
    """
    limit = time.perf_counter() + _QUERY_SECONDS
    while not query():
        if time.perf_counter() > limit:
            raise Failure(
                f"`query` of the {name} is false {_QUERY_SECONDS} s after {_SECONDS} s of work"
            )
        time.sleep(0.001)


def _settle(products: Products, *streams: Any) -> None:
    """Wait by reads, which wait even if `synchronize` does not."""
    products.new_result()
    for stream in streams:
        if stream is not None:
            with stream:
                products.new_result()


def _work(products: Products) -> str:
    size = len(products.right_NN)
    return f"{products.count} products of {size} x {size}, {_TRIES} tries"
