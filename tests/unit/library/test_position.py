"""Position of a loader in a checkpoint: the middle of an epoch, its end, another loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lmcore.base.errors import ConfigError


class Noisy(Dataset[torch.Tensor]):
    """Samples with noise of torch's default generator, as an augmentation draws it."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


class Stream(IterableDataset[int]):
    """Samples without indices."""

    def __iter__(self) -> Iterator[int]:
        yield from range(22)


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLES = TensorDataset(torch.arange(22))
LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "in order": lambda: DataLoader(SAMPLES, 4),
    "shuffled": lambda: DataLoader(SAMPLES, 4, shuffle=True),
    "noisy": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "own generator": lambda: DataLoader(SAMPLES, 4, shuffle=True, generator=numbers(3)),
    "generator of a sampler": lambda: DataLoader(
        SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES, generator=numbers(4)), 4, True)
    ),
    "weighted": lambda: DataLoader(
        SAMPLES, 4, sampler=WeightedRandomSampler(torch.arange(22.0), 22)
    ),
    "with replacement": lambda: DataLoader(
        SAMPLES, 4, sampler=RandomSampler(SAMPLES, replacement=True, num_samples=40)
    ),
    "without batches": lambda: DataLoader(SAMPLES, batch_size=None, shuffle=True),
    "workers": lambda: DataLoader(SAMPLES, 4, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Stream(), 4),
    "list": lambda: [torch.tensor([number]) for number in range(6)],
}


def read(rt: Any, batches: Any, epochs: int, save: Any = None) -> list[Any]:
    """Return the batches of some epochs, each with a random number that the loop draws."""
    found: list[Any] = []
    for _ in range(epochs):
        for batch in batches:
            found.append((torch.as_tensor(batch[0]).tolist(), torch.rand(()).item()))
            if save is not None and len(found) == save[0]:
                rt.save(save[1], batches=batches)
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_goes_on(start: Any, tmp_path: Path, kind: str) -> None:
    """An uninterrupted loop has the same rest, next epoch and other draws."""
    with start() as rt:
        torch.manual_seed(5)
        batches = rt.loader(LOADERS[kind]())
        epoch = len(read(rt, batches, 1))
        wanted = read(rt, batches, 2, (3, tmp_path))
    with start() as rt:
        torch.manual_seed(6)
        batches = rt.loader(LOADERS[kind]())
        rt.load(tmp_path, batches=batches)
        assert batches.state_dict()["taken"] == 3
        assert read(rt, batches, 2) == wanted[3:]
        assert len(wanted) == 2 * epoch


def test_a_position_at_an_end(start: Any, tmp_path: Path) -> None:
    """After the last batch the epoch has no more; after its end or `break` the next one begins."""
    with start() as rt:
        batches = rt.loader(LOADERS["shuffled"]())
        for _ in batches:
            if batches.is_last:
                state = batches.state_dict()
        assert state["taken"] == 6
        assert batches.state_dict()["taken"] == 0
        for _ in batches:
            break
        assert batches.state_dict()["taken"] == 0
        batches.load_state_dict(state)
        assert list(batches) == []
        assert len(list(batches)) == 6


@pytest.mark.parametrize(
    "other, words",
    [
        (lambda: DataLoader(SAMPLES, 4), "order: drawn then, sequence now"),
        (lambda: DataLoader(SAMPLES, 2, shuffle=True), "batches in an epoch: 6 then, 11 now"),
        (lambda: DataLoader(Stream(), 4), "order: drawn then, stream now"),
    ],
)
def test_another_loader(start: Any, other: Any, words: str) -> None:
    """Other batches cannot follow; the error says what differs."""
    with start() as rt:
        batches = rt.loader(LOADERS["shuffled"]())
        epoch = iter(batches)
        next(epoch)
        state = batches.state_dict()
        with pytest.raises(ConfigError) as error:
            rt.loader(other()).load_state_dict(state)
    assert words in error.value.render()


def test_other_states(start: Any) -> None:
    """The state of another object is refused, and a stream that has become shorter."""
    with start() as rt:
        batches = rt.loader([torch.ones(1)] * 3)
        with pytest.raises(ConfigError, match="the state of another object"):
            batches.load_state_dict({"last_epoch": 3})
        stream = rt.loader(iter([1, 2, 3]))
        epoch = iter(stream)
        next(epoch), next(epoch)
        shorter = rt.loader(iter([1]))
        shorter.load_state_dict(stream.state_dict())
        with pytest.raises(ConfigError, match="cannot go on after 2 batches: it has 1"):
            iter(shorter)
