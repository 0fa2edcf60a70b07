"""Worker processes share the samples of a stream, unless it divides itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lmcore.library.loader import _WorkerInfo, shard_loader
from lmcore.runtime.launch.rank import RankInfo

create_device = pytest.importorskip("lmcore_cpu.device").create_device
CpuSection = pytest.importorskip("lmcore_cpu.settings").CpuSection


class Stream(IterableDataset[Any]):
    """Whole numbers from a start on, in steps."""

    def __init__(self, count: int = 20) -> None:
        self.count, self.start, self.step = count, 0, 1

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.start, self.count, self.step)


class Divided(Stream):
    """Stream that divides itself."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id, self.count, info.num_workers)


class Late(Stream):
    """Stream that divides its second half only."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(10)
        info = get_worker_info()
        assert info is not None
        yield from range(10 + info.id, self.count, info.num_workers)


def divide(_worker: int) -> None:
    """Divide the worker's dataset, as torch's documentation shows."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.start, dataset.step = info.id, info.num_workers


def seed(_worker: int) -> None:
    """Set random numbers, which divides nothing."""
    torch.manual_seed(get_worker_info().seed % 2**32)  # type: ignore[union-attr]


def samples_of(loader: DataLoader[Any], *, shard: bool = True, epochs: int = 1) -> list[list[int]]:
    """Return the samples of each epoch."""
    device = create_device(CpuSection())
    runtime: Any = SimpleNamespace(device=device, rank=RankInfo(), processes=None)
    batches = shard_loader(loader, runtime, seed=1, shard=shard)
    return [[int(x) for batch in batches for x in batch] for _ in range(epochs)]


@pytest.mark.parametrize(
    "dataset,function",
    [(Stream, None), (Divided, None), (Stream, divide), (Stream, seed)],
    ids=["plain", "divided", "divided at the start", "seeded"],
)
def test_each_sample_comes_once(
    dataset: Callable[[], Stream], function: Callable[[int], None] | None
) -> None:
    """Divided by the loader, the dataset or its workers' start, in each epoch of the workers."""
    loader = DataLoader(
        dataset(), batch_size=2, num_workers=2, worker_init_fn=function, persistent_workers=True
    )
    for samples in samples_of(loader, epochs=2):
        assert sorted(samples) == [*range(20)]


def test_fewer_than_two_workers() -> None:
    """One worker, or none, reads the samples in their order."""
    for count in (0, 1):
        (samples,) = samples_of(DataLoader(Stream(), batch_size=4, num_workers=count))
        assert samples == [*range(20)]


def test_a_dataset_that_shards_itself() -> None:
    """With `shard=False` the loader is left as it is."""
    (samples,) = samples_of(DataLoader(Stream(6), batch_size=2, num_workers=2), shard=False)
    assert sorted(samples) == sorted([*range(6)] * 2)


def test_divided_too_late() -> None:
    """A stream that divides itself after its first sample is an error: samples would be lost."""
    with pytest.raises(Exception, match="`Late` looks at `get_worker_info"):
        samples_of(DataLoader(Late(), batch_size=2, num_workers=2))


def test_the_loader_stays_as_it_is() -> None:
    """The user's loader keeps its dataset, which the returned one shows."""
    dataset = Stream()
    loader = DataLoader(dataset, batch_size=2, num_workers=2, worker_init_fn=seed)
    device = create_device(CpuSection())
    runtime: Any = SimpleNamespace(device=device, rank=RankInfo(), processes=None)
    shared = shard_loader(loader, runtime, seed=1)
    assert loader.dataset is shared.dataset is dataset
    assert loader.worker_init_fn is shared.worker_init_fn is seed


def test_a_copy_of_the_information() -> None:
    """A dataset that keeps it can be copied, and sent to another process."""
    info = _WorkerInfo(SimpleNamespace(id=1, num_workers=2))
    for copied in (copy.copy(info), copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert (copied.id, copied.num_workers) == (1, 2)
