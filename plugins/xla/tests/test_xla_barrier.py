"""The barrier that torch_xla's process group gets: ranks in threads, which meet in a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from torch import distributed
from torch.distributed import distributed_c10d

if not distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from lmcore_xla import comm


class Group:
    """Stand-in for torch_xla's process group."""

    def __init__(self, store: Any, rank: int, size: int = 2, seconds: float = 30) -> None:
        self.prefix_store, self.timeout = store, timedelta(seconds=seconds)
        self.rank, self.size = (lambda: rank), (lambda: size)


@pytest.mark.parametrize("last", [0, 1])
def test_no_rank_leaves_before_the_last_one_enters(last):
    """Two events give the order: the last rank enters, another one has left."""
    store = distributed.HashStore()
    groups = [Group(store, rank) for rank in range(2)]
    for _ in range(3):
        entered, left = Event(), Event()

        def first(entered: Event = entered, left: Event = left) -> bool:
            comm.barrier(groups[1 - last]).wait()
            left.set()
            return entered.is_set()

        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(first)
            assert not left.wait(0.1)
            entered.set()
            comm.barrier(groups[last]).wait()
            assert found.result()


def test_one_key_stays_of_each():
    """A long run with many barriers must not fill the store."""
    store = distributed.HashStore()
    groups = [Group(store, rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            list(threads.map(comm.barrier, groups))
    assert store.num_keys() == 20 + 1


def test_a_missing_rank_is_an_error():
    group = Group(distributed.HashStore(), 0, seconds=0.2)
    with pytest.raises(RuntimeError):
        comm.barrier(group)


def test_a_group_of_one_waits_for_nobody():
    comm.barrier(Group(distributed.HashStore(), 0, size=1, seconds=0.2)).wait()


def test_torch_xlas_group_gets_it(pjrt, monkeypatch):
    """Its own barrier returns at once."""
    from torch_xla.distributed import xla_backend

    # Both are restored at the end.
    monkeypatch.setattr(xla_backend.ProcessGroupXla, "barrier", xla_backend.ProcessGroupXla.barrier)
    monkeypatch.setattr(distributed, "new_group", distributed.new_group)
    limit = timedelta(seconds=0.2)
    group = xla_backend.ProcessGroupXla(distributed.HashStore(), 0, 2, limit)
    group.barrier(opts=distributed_c10d.BarrierOptions()).wait()
    (backend, _) = comm.backends()
    assert backend.register is not None
    backend.register()
    with pytest.raises(RuntimeError):
        group.barrier(opts=distributed_c10d.BarrierOptions())
