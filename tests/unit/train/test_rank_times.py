"""Times of the ranks: who is slow, when they are exchanged, how often a rank is named."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcore.contract import Device
from lmcore.parallel.wait_clock import WaitClock
from lmcore.train import rank_times
from lmcore.train.rank_times import RankTimer, SlowRank, slow_rank
from lmcore.train.step_record import StepRecord


@pytest.mark.parametrize(
    "times, stages, expected",
    [
        ([100, 149], [[0, 1]], None),
        ([100, 150], [[0, 1]], SlowRank(1, 150, 100)),
        ([300, 100, 100, 110], [[0, 1, 2, 3]], SlowRank(0, 300, 100)),
        ([100, 100, 140, 140], [[0, 1, 2, 3]], None),
        ([100, 100, 300, 310], [[0, 1], [2, 3]], None),  # the last stage has the head
        ([100, 160, 300, 600], [[0, 1], [2, 3]], SlowRank(3, 600, 300)),
        ([100, 900], [[0], [1]], None),
        ([1, 9], [[0, 1]], None),  # a difference of milliseconds
        ([0, 12], [[0, 1]], SlowRank(1, 12, 1e-3)),
    ],
)
def test_slow_rank(times: list[float], stages: list[list[int]], expected: SlowRank | None) -> None:
    """A rank is compared with the median of the ranks that have the same work."""
    assert slow_rank(times, stages) == expected


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes the timer of rank 0 of three, and its times by rank."""

    def make(interval: int, others: list[float]) -> RankTimer:
        def gather(_runtime: Any, own: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[float(own)], *([other] for other in others)])

        monkeypatch.setattr(rank_times, "all_gather_scalars", gather)
        device = SimpleNamespace(
            torch_device=torch.device("cpu"),
            new_event=None,
            pin_memory=None,
            step_boundary=Device.step_boundary,
        )
        rank = SimpleNamespace(rank=0, world_size=3)
        runtime: Any = SimpleNamespace(device=device, hosts=["a", "b", "c"], rank=rank)
        ticks = itertools.count(0.0, 0.02)
        mesh: Any = SimpleNamespace(
            clock=WaitClock(ticks.__next__), stage_ranks=lambda: [[0, 1, 2]]
        )
        return RankTimer(mesh, runtime, interval=interval)

    return make


def steps(timer: RankTimer, count: int) -> list[StepRecord]:
    """Take steps of 20 ms and return the records with the times of ranks."""
    found = []
    for step in range(1, count + 1):
        record = StepRecord(
            step=step,
            consumed_samples=step,
            consumed_tokens=step,
            global_batch_size=1,
            learning_rate=0.1,
        )
        timer.start()
        timer.stop()
        timer.complete(record)
        if record.slowest_rank is not None:
            found.append(record)
    return found


@pytest.mark.parametrize("interval, at", [(1, [9, 17, 25]), (10, [10, 20, 30]), (4, [12, 20, 28])])
def test_when_they_are_exchanged(timer: Any, interval: int, at: list[int]) -> None:
    """At the log interval, after at least eight steps; the first one, which compiles, left out."""
    records = steps(timer(interval, [30.0, 25.0]), 30)
    assert [record.step for record in records] == at
    row = records[0].to_dict()
    assert row["rank_time_min_ms"] == pytest.approx(20.0)
    assert (row["rank_time_median_ms"], row["rank_time_max_ms"]) == (25.0, 30.0)
    assert row["slowest_rank"] == 1


def test_a_rank_is_named_once(timer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With its host, its ratio and both times; not again at every exchange."""
    with caplog.at_level(logging.WARNING):
        steps(timer(10, [21.0, 80.0]), 50)
    (record,) = caplog.records
    assert "rank 2 on host c takes 3.9x the median step of the other ranks" in record.message
    assert "80.0 ms in place of 20.5 ms" in record.message


def test_a_usual_run_names_none(timer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks of about the same time are only in the metrics."""
    with caplog.at_level(logging.WARNING):
        assert len(steps(timer(10, [22.0, 18.0]), 50)) == 5
    assert not caplog.records
