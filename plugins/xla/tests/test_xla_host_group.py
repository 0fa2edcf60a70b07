"""`HostGroup` on tensors of the host: two ranks in two threads, which call the collectives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

from lmcore_xla.host_group import HostGroup

SUM = distributed.ReduceOp.SUM


@pytest.fixture
def on_both() -> Callable[[Callable[[HostGroup, int], Any]], list[Any]]:
    """Return a function that calls another with the group of each of two ranks, at once."""
    store, limit = distributed.HashStore(), timedelta(seconds=30)

    def call(function: Callable[[HostGroup, int], Any]) -> list[Any]:
        def run(rank: int) -> Any:
            return function(HostGroup(store, rank, 2, limit), rank)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(run, range(2)))

    return call


def own(rank: int, count: int = 4) -> torch.Tensor:
    """Return a rank's numbers."""
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def test_all_reduce_sums_in_place(on_both):
    def function(group, rank):
        tensor = own(rank)
        options = c10d.AllreduceOptions()
        options.reduceOp = SUM
        work = group.allreduce([tensor], options)
        work.wait()
        assert torch.equal(work.result()[0], tensor)
        return tensor

    for found in on_both(function):
        assert torch.equal(found, own(0) + own(1))


def test_strided_and_broadcast(on_both):
    """A column, whose numbers are apart in memory, gets the root's."""

    def function(group, rank):
        table = torch.zeros(4, 2)
        table[:, 1] = own(rank)
        options = c10d.BroadcastOptions()
        options.rootRank = 1
        group.broadcast([table[:, 1]], options).wait()
        return table

    for found in on_both(function):
        assert torch.equal(found[:, 1], own(1))
        assert not found[:, 0].any()


def test_gather_and_scatter_sums(on_both):
    def function(group, rank):
        gathered, listed = torch.empty(8), [torch.empty(4), torch.empty(4)]
        group._allgather_base(gathered, own(rank)).wait()
        group.allgather([listed], [own(rank)]).wait()
        scattered = torch.empty(2)
        options = c10d.ReduceScatterOptions()
        options.reduceOp = SUM
        group._reduce_scatter_base(scattered, own(rank), options).wait()
        return gathered, torch.cat(listed), scattered

    every = torch.cat([own(0), own(1)])
    for rank, (gathered, listed, scattered) in enumerate(on_both(function)):
        assert torch.equal(gathered, every)
        assert torch.equal(listed, every)
        assert torch.equal(scattered, (own(0) + own(1)).view(2, 2)[rank])


def test_exchange_of_parts(on_both):
    def function(group, rank):
        found = torch.empty(4)
        group.alltoall_base(found, own(rank), [], [], c10d.AllToAllOptions()).wait()
        return found

    for rank, found in enumerate(on_both(function)):
        assert torch.equal(found, torch.cat([own(0).view(2, 2)[rank], own(1).view(2, 2)[rank]]))


def test_send_and_receive(on_both):
    def function(group, rank):
        tensor = own(rank)
        if rank == 0:
            group.send([tensor], 1, 0).wait()
        else:
            group.recv([tensor], 0, 0).wait()
        group.barrier().wait()
        group.barrier(opts=c10d.BarrierOptions()).wait()  # as torch calls it
        return tensor

    assert all(torch.equal(found, own(0)) for found in on_both(function))


def test_both_send_before_they_receive(on_both):
    """The schedules of a pipeline do: activations and gradients pass each other."""

    def function(group, rank):
        found = torch.empty(4)
        works = [group.send([own(rank)], 1 - rank, 0), group.recv([found], 1 - rank, 0)]
        for work in works:
            work.wait()
        return found

    for rank, found in enumerate(on_both(function)):
        assert torch.equal(found, own(1 - rank))


def test_a_message_from_any_rank(on_both):
    """It names the rank that sent it, and is copied once."""

    def function(group, rank):
        if rank == 0:
            group.send([own(0)], 1, 0).wait()
            return None
        found = torch.empty(4)
        work = group.recv_anysource([found], 0)
        work.wait()
        found += 1
        work.wait()
        return work._source_rank(), (found - 1).tolist()

    assert on_both(function) == [None, (0, own(0).tolist())]


def test_a_failing_rank_is_an_error_of_the_other(on_both):
    """A missed collective ends by its time limit, and raises where it is called."""
    store, limit = distributed.HashStore(), timedelta(seconds=1)

    def run(rank: int) -> str:
        group = HostGroup(store, rank, 2, limit)
        if rank == 1:
            return "left"
        with pytest.raises(RuntimeError):
            group.allreduce([own(0)], c10d.AllreduceOptions()).wait()
        return "raised"

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == ["raised", "left"]
