"""Batches of a loader of the user's own: as a plain loop has them, in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)
from user_loop import OddBatches, Unsized, dataset, numbers

from lmcore.base.errors import ConfigError
from lmcore.data.loading.nested import map_tensors
from lmcore.library.loader import ShardedLoader, shard_loader
from lmcore.runtime.launch.rank import RankInfo

create_device = pytest.importorskip("lmcore_cpu.device").create_device
CpuSection = pytest.importorskip("lmcore_cpu.settings").CpuSection

SEED = 7


def runtime(device: Any = None) -> Any:
    """Return the part of a runtime that a loader uses."""
    device = device or create_device(CpuSection())
    return SimpleNamespace(device=device, rank=RankInfo(), processes=None)


class Noisy(Dataset[Any]):
    """Samples with noise that is drawn when they are read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return {
            "x": torch.rand(2) + i,
            "name": f"sample {int(i)}",
            "pair": (i, torch.tensor(int(i))),
        }


class Stream(IterableDataset[Any]):
    """Samples of unknown number, or of one that is claimed."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            yield torch.rand(2) + i


PLAIN = {
    "shuffle": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
    "last batch dropped": lambda: DataLoader(Noisy(), batch_size=3, drop_last=True),
    "generator": lambda: DataLoader(
        Noisy(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "batch sampler": lambda: DataLoader(Noisy(), batch_sampler=OddBatches()),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "worker": lambda: DataLoader(Noisy(), batch_size=4, num_workers=1, persistent_workers=True),
    "list": lambda: numbers(4),
}


@pytest.mark.parametrize("name", PLAIN)
def test_one_process_is_a_plain_loop(name: str) -> None:
    """Batches and the draws between them equal a loop over the loader, bit for bit."""

    def loop(make: Any) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        batches = make(PLAIN[name]())
        seen = []
        for _ in range(2):
            for batch in batches:
                seen.append((batch, torch.rand(1)))
                if isinstance(batches, ShardedLoader) and name != "stream":
                    _ = batches.is_last
        return seen, torch.get_rng_state()

    wanted, state = loop(lambda loader: loader)
    found, own_state = loop(lambda loader: shard_loader(loader, runtime(), seed=SEED))
    assert len(wanted) > 3
    assert map_tensors(found, Tensor.tolist) == map_tensors(wanted, Tensor.tolist)
    assert torch.equal(own_state, state)


@pytest.mark.parametrize(
    "loader",
    [DataLoader(dataset(), batch_size=4), DataLoader(Stream(9), batch_size=4), Unsized()],
    ids=["known", "unknown", "own"],
)
def test_the_last_batch_is_marked(loader: Any) -> None:
    """Only while it is in use, in each epoch, and however often it is read."""
    batches = shard_loader(loader, runtime(), seed=SEED)
    assert not batches.is_last
    for _ in range(2):
        marks = [(batches.is_last, batches.is_last) for _ in batches]
        assert marks == [(False, False)] * (len(marks) - 1) + [(True, True)]
        assert not batches.is_last
    for _ in batches:
        break
    assert not batches.is_last


def test_an_error_comes_with_its_own_batch() -> None:
    """A look for the next batch does not raise the error of that batch."""

    def broken() -> Iterator[Any]:
        yield 1
        raise KeyError("damaged")

    batches = shard_loader(broken(), runtime(), seed=SEED)
    iterator = iter(batches)
    assert next(iterator) == 1
    assert not batches.is_last
    assert not batches.is_last
    with pytest.raises(KeyError, match="damaged"):
        next(iterator)


def test_attributes_of_the_loader() -> None:
    """Length, dataset and batch size equal the user's loader's; an epoch is passed on."""
    loader = DataLoader(Noisy(), batch_size=3)
    epochs: list[int] = []
    loader.dataset.set_epoch = epochs.append  # type: ignore[attr-defined]
    batches = shard_loader(loader, runtime(), seed=SEED)
    assert (len(batches), batches.batch_size) == (4, 3)
    assert batches.dataset is loader.dataset
    batches.set_epoch(3)
    assert epochs == [3]
    with pytest.raises(ValueError, match="-1"):
        batches.set_epoch(-1)
    assert not hasattr(batches, "_missing")
    with pytest.raises(TypeError):
        len(shard_loader(DataLoader(Stream()), runtime(), seed=SEED))


def test_batches_move_to_the_device() -> None:
    """A device without queues gets each batch when it is due."""
    device = SimpleNamespace(torch_device=torch.device("meta"), new_stream=None)
    batches = shard_loader(DataLoader(Noisy(), batch_size=5), runtime(device=device), seed=SEED)
    for batch in batches:
        assert batch["x"].device.type == batch["pair"][1].device.type == "meta"
        assert len(batch["name"]) == 5


def test_batches_are_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with streams has the next batch before the batch in use is computed."""

    class Stream(SimpleNamespace):
        wait_event = staticmethod(lambda event: None)

        def __enter__(self) -> None: ...
        def __exit__(self, *raised: object) -> None: ...

    event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
    monkeypatch.setattr("torch.accelerator.current_stream", lambda device: Stream())
    functions = {"new_stream": Stream, "new_event": lambda: event, "pin_memory": torch.clone}
    device = SimpleNamespace(
        torch_device=torch.device("meta"), require=functions.__getitem__, **functions
    )
    samples = Reading(9)
    batches = shard_loader(DataLoader(samples), runtime(device=device), seed=SEED)
    for _ in range(2):
        samples.read.clear()
        marks = []
        for number, batch in enumerate(batches):
            assert batch.device.type == "meta"
            assert samples.read == [*range(min(number + 2, 9))]
            marks.append(batches.is_last)
        assert marks == [False] * 8 + [True]


class Reading(Dataset[Any]):
    """Samples that write down when they are read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        self.read.append(i)
        return i


@pytest.mark.parametrize(
    "given, text",
    [
        ("corpus.txt", "it was given a `str`"),
        ({"x": torch.ones(3)}, "it was given a `dict`"),
        (torch.ones(3, 2), "it was given a `Tensor`"),
        (DataLoader, "it was given a `type`"),
        (5, "it was given a `int`"),
        (Noisy(), "it was given a `Noisy`, which has samples"),
    ],
)
def test_what_is_no_loader(given: Any, text: str) -> None:
    """The message names the type, and what to give."""
    with pytest.raises(ConfigError, match="takes a `torch") as raised:
        shard_loader(given, runtime(), seed=SEED)
    assert raised.value.why == text
    assert "DataLoader(" in str(raised.value.hint)


def test_a_loader_given_twice() -> None:
    """The result is not a loader to give again."""
    batches = shard_loader(numbers(3), runtime(), seed=SEED)
    with pytest.raises(ConfigError, match="returned by `loader` already"):
        shard_loader(batches, runtime(), seed=SEED)


class Dying(Noisy):
    """A dataset that ends its process."""

    def __getitem__(self, i: int) -> Any:
        os._exit(3)


def test_a_worker_that_dies() -> None:
    """The error is torch's own."""
    batches = shard_loader(DataLoader(Dying(), num_workers=1), runtime(), seed=SEED)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        next(iter(batches))


def test_a_sampler_of_other_processes() -> None:
    """One process does not train on a part of the data, but with `shard=False`."""
    sampler = DistributedSampler(dataset(), num_replicas=2, rank=0)
    loader = DataLoader(dataset(), sampler=sampler)
    with pytest.raises(ConfigError, match="shards for rank 0 of 2") as raised:
        shard_loader(loader, runtime(), seed=SEED)
    assert raised.value.why == "this process is rank 0 of 1"
    assert len([*shard_loader(loader, runtime(), seed=SEED, shard=False)]) == 5
