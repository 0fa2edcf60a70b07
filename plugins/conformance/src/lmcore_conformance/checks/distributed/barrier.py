"""Level 4: a barrier holds every rank until the last one has entered it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import distributed

from lmcore_conformance.registry import Failure, check

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

    The order is that of keys in the store of the run, not of times: on a slow machine a wrong
    barrier can be missed, and a right one cannot be found wrong.

    Raises:
        Failure: On every rank, if one has left early.
    """
    store = bench.processes.rendezvous.store
    key = f"{name}/{last}"
    left = f"{key}/left"
    fault = ""
    if bench.rank != last:
        store.set(f"{key}/enters/{bench.rank}", "1")
        call()
        store.set(left, str(bench.rank))
    else:
        others = [rank for rank in range(bench.size) if rank != last]
        store.wait([f"{key}/enters/{rank}" for rank in others], _ENTER_SECONDS)
        if store.wait([left], _EARLY_SECONDS):
            early = (store.get(left) or b"?").decode()
            fault = f"{name}: rank {early} left it before rank {last} had entered it"
        else:
            call()
    found = [text for text in bench.processes.gather(fault) if text]
    if found:
        raise Failure(f"{found[0]}: it does not wait for all ranks")
