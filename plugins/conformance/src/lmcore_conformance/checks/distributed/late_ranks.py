"""Level 4: a rank comes late to a barrier, or too late to a collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed

from lmcore_conformance.process.exchanged import own
from lmcore_conformance.registry import Failure, NotRun, check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.process.ranks import RankBench

_EARLY_SECONDS = 0.5
"""Time that a rank keeps the others waiting, if none of them leaves."""

_ENTER_SECONDS = 20.0
"""Time that it waits for the others to be about to enter."""


@check(
    "distributed.barrier",
    "No rank leaves `barrier` before the last rank has entered it: among all, in a group of "
    "`new_group`, and in `wait` with `async_op=True`. In a group of one it waits for no other "
    "rank.",
    level="L4",
    group="distributed",
    reason="A user's loop reads after it what another rank has written before it.",
    requires=["distributed", "barrier"],
)
def barrier(bench: RankBench) -> str:
    """Have each rank enter last, after it has seen whether another one has left."""
    everyone = bench.processes.new_group(range(bench.size))
    alone = [bench.processes.new_group([rank]) for rank in range(bench.size)][bench.rank]
    calls: dict[str, Callable[[], object]] = {
        "`barrier`": distributed.barrier,
        "`barrier` in a group of `new_group`": partial(distributed.barrier, group=everyone),
        "`wait` of `barrier` with `async_op=True`": _wait_for_work,
    }
    for name, call in calls.items():
        for last in range(bench.size):
            _expect_held(bench, name, call, last)
    if bench.rank == 0:
        distributed.barrier(group=alone)
    bench.processes.gather(None)  # the others wait here, in no barrier
    return "among all, in a group, asynchronously, each rank last; alone"


def _wait_for_work() -> None:
    work: Any = distributed.barrier(async_op=True)
    work.wait()


def _expect_held(bench: RankBench, name: str, call: Callable[[], object], last: int) -> None:
    """Call a barrier; rank *last* enters when the others are there and none of them has left.

    Keys in the store of the run give the order, not times: on a slow machine a wrong barrier
    can be missed, and a right one cannot be found wrong.

    Raises:
        Failure: On every rank, if one has left early.
    """
    store = bench.processes.rendezvous.store
    key = f"{name}/{last}"
    left = f"{key}/left"
    fault = ""
    if bench.rank != last:
        _enter(bench, key)
        call()
        store.set(left, str(bench.rank))
    else:
        _wait_for_others(bench, key, last)
        if store.wait([left], _EARLY_SECONDS):
            early = (store.get(left) or b"?").decode()
            fault = f"{name}: rank {early} left it before rank {last} had entered it"
        else:
            call()
    found = [text for text in bench.processes.gather(fault) if text]
    if found:
        raise Failure(f"{found[0]}: it does not wait for all ranks")


def _enter(bench: RankBench, key: str) -> None:
    """Tell the others that this rank is about to enter."""
    bench.processes.rendezvous.store.set(f"{key}/enters/{bench.rank}", "1")


def _wait_for_others(bench: RankBench, key: str, last: int) -> None:
    """Wait until every rank but *last* has called `_enter`."""
    others = [f"{key}/enters/{rank}" for rank in range(bench.size) if rank != last]
    bench.processes.rendezvous.store.wait(others, _ENTER_SECONDS * max(bench.patience, 1.0))


@check(
    "distributed.missed",
    "A collective that one rank misses ends with an error within the timeout on all ranks, among "
    "all and in a group of `new_group`.",
    reason="A job that hangs for half an hour after a failure costs its whole allocation.",
    level="L4",
    group="distributed-timeout",
    requires=["distributed"],
    seconds=60,
)
def missed(bench: RankBench) -> str:
    """Let rank 1 come late to a broadcast in a group, then to a reduction among all."""
    group = bench.processes.new_group(range(bench.size))
    calls: dict[str, Callable[[Tensor], object]] = {
        "`broadcast` in a group": lambda tensor: distributed.broadcast(tensor, 1, group=group),
        "`all_reduce`": distributed.all_reduce,
    }
    seconds = bench.processes.timeout
    faults, seen = [], []
    for name, call in calls.items():
        bench.processes.gather(None)  # the late rank may still be in the last call
        _call_and_read(bench, call)  # a backend may connect in the first call
        if bench.rank == 1:
            _wait_for_others(bench, name, 1)  # however long they take to get there
            time.sleep(2 * seconds)
        else:
            _enter(bench, name)
        begin = time.monotonic()
        raised = _raised(partial(_call_and_read, bench, call))
        took = time.monotonic() - begin
        if bench.rank == 1:
            continue
        if not raised:
            faults.append(
                f"{name}: it waited {took:.1f} s for a rank that came late, without an error; "
                f"the timeout that its group was made with is {seconds:g} s"
            )
        elif took > 5 * seconds * max(bench.patience, 1.0):
            faults.append(f"{name}: the error came after {took:.1f} s, not after {seconds:g} s")
        seen.append(f"{name}: {raised} after {took:.1f} s")
    return conclude(faults, "; ".join(seen) or "came late")


def _call_and_read(bench: RankBench, call: Callable[[Tensor], object]) -> None:
    tensor = own(bench)
    call(tensor)
    bench.device.synchronize()
    tensor.cpu()


def _raised(function: Callable[[], None]) -> str:
    try:
        function()
    except NotRun:
        raise
    except RuntimeError as error:
        return type(error).__name__
    return ""
