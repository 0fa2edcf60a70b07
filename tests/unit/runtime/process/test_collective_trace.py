"""The collective in which a run hangs, from what the ranks report."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.runtime.process.collective_trace import (
    GroupTrace,
    hanging_collectives,
    hanging_sends,
    trace_collectives,
)


def trace(last: int, *, waiting: int = 0, time: int = 0, sends: bool = False) -> GroupTrace:
    """Return the trace of a rank that has begun *last* all-reduces of the group `data`."""
    ops = {str(number): "all_reduce of float32 [8]" for number in range(1, last + 1)}
    return GroupTrace("data", last, waiting, ops, time, sends)


def test_a_rank_that_has_not_begun() -> None:
    """The collective after its last one is the one in which the other ranks wait."""
    traces = [{"1": trace(1532)}, {"1": trace(1531)}, {"1": trace(1532, waiting=1532)}]
    assert hanging_collectives(traces, [{}, {}, {}], 0) == [
        "ranks 0, 2: in `all_reduce` #1532 of group data (float32 [8])",
        "rank 1: has not begun it; its last one is `all_reduce` #1531",
    ]


def test_several_collectives_in_flight() -> None:
    """The first that the late rank has not begun is named, not the last that others began."""
    traces = [{"1": trace(9, waiting=6)}, {"1": trace(5)}]
    first, second = hanging_collectives(traces, [{}, {}], 0)
    assert "`all_reduce` #6 of group data" in first
    assert second.endswith("#5")


def test_a_rank_that_does_not_answer() -> None:
    """The number at its last sign of life is a lower bound; other groups are not named."""
    traces = [{"0": GroupTrace("world", 3, 0, {}, 1, sends=False), "1": trace(9, time=2)}, None]
    assert hanging_collectives(traces, [{}, {"0": 3, "1": 7}], 0) == [
        "rank 0: in `all_reduce` #9 of group data (float32 [8])",
        "rank 1: last seen at #7",
    ]
    assert hanging_collectives(traces, [{"1": 8}, {}], 0)[-1] == "rank 1: last seen at #0"
    (line,) = hanging_collectives(traces, [{}, {}], 0)  # of a backend that torch does not count
    assert line.startswith("rank 0: in `all_reduce` #9")
    assert hanging_collectives(traces, [{}, {"2 tensor": 7}], 0) == []


def test_sends_are_not_taken_for_collectives() -> None:
    """Counts of a group that sends differ between ranks that are not behind."""
    assert hanging_collectives([{"1": trace(9, sends=True)}, None], [{}, {"1": 4}], 0) == []
    assert hanging_collectives([{"1": trace(9)}, None], [{}, {"1": 9}], None) == []


def test_sends_in_a_pipeline() -> None:
    """The counts of the groups that send are shown as they are."""
    counts = [{"0 default_pg": 3, "4 pipeline": 17}, {"4 pipeline": 15}, {}]
    assert hanging_sends(counts) == [
        "rank 0: last seen at send or receive #17 of group pipeline",
        "rank 1: last seen at send or receive #15 of group pipeline",
    ]


def test_ranks_of_other_groups() -> None:
    """A rank outside a group is not behind in it."""
    traces = [{"1": trace(5, waiting=5)}, {"1": trace(5, waiting=5)}, {"2": trace(3)}]
    assert hanging_collectives(traces, [{}, {}, {}], None) == []


def test_the_flight_recorder_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives that have not ended are waited in; what is sent is counted separately."""

    def entry(number: int, *, ended: bool, shift: int = 0) -> dict[str, Any]:
        return {
            "collective_seq_id": number,
            "op_id": number + shift,
            "is_p2p": False,
            "process_group": ["1", "data"],
            "profiling_name": "gloo:all_reduce",
            "state": "scheduled",
            "retired": ended,
            "input_sizes": [[2, 3]],
            "input_dtypes": ["Float"],
            "time_created_ns": number,
        }

    entries = [entry(1, ended=True), entry(2, ended=False), entry(3, ended=False, shift=1)]
    native = SimpleNamespace(_dump_fr_trace_json=lambda *_: json.dumps({"entries": entries}))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", native)
    (found,) = trace_collectives().values()
    expected = {"name": "data", "last": 3, "waiting": 2, "time": 3, "sends": True}
    assert {name: found[name] for name in expected} == expected
    assert found["ops"]["2"] == "all_reduce of float32 [2, 3]"
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace())
    assert trace_collectives() == {}
