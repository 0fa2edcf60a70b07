"""Loaders of the user's own in two processes: one order for both, and a difference is named."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytestmark = pytest.mark.distributed


def test_two_processes_share_each_epoch(start: Any) -> None:
    """They read all samples in one order, each with its own random numbers; epochs differ.

    The first loader is shuffled by torch, the second one by a sampler whose numbers only rank 0
    knows.  A worker process reads the samples.
    """
    ranks = start("share", timeout=60.0)
    for ended in ranks:
        assert ended.status == 0, ended.errors
    assert [len(ended.printed) for ended in ranks] == [5, 5]
    epochs = list(zip(*(ended.printed[:4] for ended in ranks), strict=True))
    orders = []
    for first, second in epochs:
        rounds = [*itertools.chain.from_iterable(zip(first, second, strict=True))]
        assert [len(indices) for indices, _ in rounds] == [2, 2, 2, 2, 1, 2]
        order = [index for indices, _ in rounds[:5] for index in indices]
        assert sorted(order) == [*range(9)]
        assert rounds[5][0] == rounds[1][0]
        drawn = [number for _, numbers in rounds for number in numbers]
        assert len({*drawn}) == len(drawn)
        orders.append(order)
    assert len({*map(tuple, orders)}) == 4


def test_streams_of_different_lengths(start: Any) -> None:
    """The rank that ends first names the numbers; the other one waits in a collective until then.

    A collective would wait for a minute.
    """
    first, second = start("streams", timeout=60.0)
    assert (first.status, second.status) == (1, 1)
    assert "error: the ranks read different numbers of batches in an epoch" in first.errors
    assert "why: rank 0: 4\n     rank 1: 5 or more" in first.errors
    assert "rank 0 stopped the run" in second.errors
    assert "rank 1: 5 or more" in second.errors
    assert max(first.seconds, second.seconds) < 30
