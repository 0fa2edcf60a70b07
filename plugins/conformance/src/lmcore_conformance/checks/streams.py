"""Level 1: queues of work keep their order, and marks in them can be waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore_conformance.registry import Failure, check

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_STEPS = 40
_SIZE = 256


def _work(x: Tensor, matrix: Tensor) -> Tensor:
    for _ in range(_STEPS):
        x = x @ matrix
    return x


def _permutation(bench: Bench) -> tuple[Tensor, Tensor]:
    """Return a matrix whose powers are exact, and the power that `_work` makes."""
    matrix = torch.eye(_SIZE).roll(1, 0)
    return matrix.to(bench.where), torch.eye(_SIZE).roll(_STEPS + 1, 0)


@check(
    "device.streams",
    "L1",
    "Work on a stream runs in order, and another stream that waits for it sees the result.",
    reason="Copies of batches and collectives overlap with computation on separate streams.",
    group="streams",
    requires=["streams"],
)
def streams(bench: Bench) -> str:
    """Start work on one stream, continue it on another, read it on the current one."""
    make = bench.device.require("new_stream")
    matrix, right = _permutation(bench)
    bench.device.synchronize()
    faults = []
    for _ in range(5):
        first, second = make(), make()
        with first:
            half = _work(matrix, matrix)
        second.wait_stream(first)
        with second:
            doubled = half * 2
        current = torch.accelerator.current_stream()
        current.wait_stream(second)
        landed = (doubled + 1).cpu()
        if not torch.equal(landed, right * 2 + 1):
            faults.append("work that waited for another stream read it before it was done")
    bench.device.synchronize()
    if faults:
        raise Failure(*dict.fromkeys(faults))
    return "two streams, five times"


@check(
    "device.stream-synchronize",
    "L1",
    "After `synchronize` on a stream its work is finished.",
    reason="The host then reads results of a side stream.",
    group="streams",
    requires=["streams"],
)
def stream_synchronize(bench: Bench) -> str:
    """Queue work and a copy to the host on a stream; wait for the stream alone."""
    stream = bench.device.require("new_stream")()
    matrix, right = _permutation(bench)
    bench.device.synchronize()
    landed = torch.zeros(_SIZE, _SIZE)
    with stream:
        landed.copy_(_work(matrix, matrix), non_blocking=True)
    stream.synchronize()
    if not torch.equal(landed, right):
        raise Failure("its work is not done after `synchronize`")
    return f"{_STEPS} products"


@check(
    "device.events",
    "L1",
    "An event is complete when all work before it is finished; a stream can wait for it.",
    reason="Without events, overlap is either wrong or needs a full synchronization.",
    group="streams",
    requires=["events", "streams"],
)
def events(bench: Bench) -> str:
    """Record, wait from another stream, synchronize and query."""
    make_stream, make_event = (bench.device.require(n) for n in ("new_stream", "new_event"))
    matrix, right = _permutation(bench)
    bench.device.synchronize()
    first, second = make_stream(), make_stream()
    event: Any = make_event()
    landed = torch.zeros(_SIZE, _SIZE)
    with first:
        done = _work(matrix, matrix)
        event.record(first)
    second.wait_event(event)
    with second:
        after = done + 1
    with first:
        landed.copy_(done, non_blocking=True)
        last: Any = make_event()
        last.record(first)
    last.synchronize()
    faults = []
    if not last.query():
        faults.append("`query` is false after `synchronize`")
    if not torch.equal(landed, right):
        faults.append("work before the event is not done after `synchronize`")
    second.synchronize()
    if not torch.equal(after.cpu(), right + 1):
        faults.append("a stream that waited for the event read the result before it was done")
    if faults:
        raise Failure(*faults)
    return "recorded, waited for, queried"
