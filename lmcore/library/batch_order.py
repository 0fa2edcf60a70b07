"""Global order of batches: every rank takes its share of one order, which is equal on all ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lmcore.base.errors import ConfigError, RunError, counted
from lmcore.base.threads import periodically

if TYPE_CHECKING:
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.process.group import Processes
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = [
    "EPOCH_END",
    "RankOrder",
    "Share",
    "checked_to_end",
    "drops_last",
    "length_of",
    "ranks_share",
    "replace_order",
    "require_a_round",
    "rounds",
    "seed_of",
    "sharding_sampler",
]

_T = TypeVar("_T")

EPOCH_END = object()
"""Mark after the last batch of a rank."""

_SEEDED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw all their numbers from their `generator`."""
_MAX_ROUNDS = 64
"""Largest number of rounds whose batches rank 0 sends at once."""
_BEAT_SECONDS = 1.0
_LEFT = b"left"
"""Number of batches of a rank that has left its epoch."""


def seed_of(seed: int, *numbers: int) -> int:
    """Return a seed that depends on *seed* and *numbers*: 64 bits without visible relation."""
    return int(np.random.SeedSequence((seed, *numbers)).generate_state(1, np.uint64)[0])


def rounds(count: int, size: int, *, drop_last: bool = False) -> int:
    """Return the number of rounds in which *size* ranks take *count* batches.

    Args:
        count: Number of batches.
        size: Number of ranks.
        drop_last: True to leave out an incomplete round.
    """
    return count // size if drop_last else (count + size - 1) // size


def drops_last(loader: Any) -> bool:
    """Return True if a loader leaves out its last batch where that is incomplete."""
    own = getattr(loader, "drop_last", False)
    return getattr(getattr(loader, "batch_sampler", None), "drop_last", own) is True


def length_of(value: Any) -> int | None:
    """Return the length; None if there is none."""
    try:
        return len(value) if isinstance(value, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def require_a_round(loader: DataLoader[Any], size: int) -> None:
    """Raise if `drop_last` leaves out all batches, as there are fewer than ranks."""
    count = length_of(loader)
    if drops_last(loader) and count is not None and 0 < count < size:
        raise ConfigError(
            f"the loader has {counted(count, 'batch', 'batches')} for {size} ranks",
            why="with `drop_last=True` a round that has no batch for each rank is left out: no "
            "batch would remain",
            hint="use a smaller `batch_size`, or `drop_last=False`",
        )


@dataclass
class Share:
    """Share of one rank in the order of an epoch.

    Attributes:
        repeats: True if its last batch is one of the first round, given again.
        padding: Number of samples at the end of its last batch that are given again.
    """

    repeats: bool = False
    padding: int = 0


def ranks_share(
    units: Iterable[_T],
    rank: int,
    size: int,
    keep: Callable[[_T], _T] = lambda unit: unit,
    *,
    share: Share | None = None,
    drop_last: bool = False,
) -> Iterator[_T]:
    """Yield units rank, rank + size, ..., as many as rank 0 has.

    If the last round has no unit for this rank, its unit of the first round is given again; the
    first unit of all if there are fewer units than ranks.  With *drop_last*, an incomplete round is
    left out on all ranks.

    Args:
        units: Batches, or lists of their indices.
        rank: Rank of this process.
        size: Number of ranks.
        keep: Function that copies a unit which may be given again.
        share: Record of this rank's share, which is changed before the last unit is repeated.
        drop_last: True to yield a unit only when the units of its round are there.
    """
    if drop_last:
        yield from _complete_rounds(units, rank, size, keep)
        return
    first: list[_T] = []  # empty, or the unit that may be given again
    count = 0
    for index, unit in enumerate(units):
        if rank and index in (0, rank):
            first = [keep(unit)]
        if index % size == rank:
            yield unit
        count = index + 1
    if 0 < count % size <= rank:
        if share is not None:
            share.repeats = True
        yield first[0]


def _complete_rounds(
    units: Iterable[_T], rank: int, size: int, keep: Callable[[_T], _T]
) -> Iterator[_T]:
    """Yield this rank's unit of each complete round."""
    own: list[_T] = []
    for index, unit in enumerate(units):
        place = index % size
        if place == rank:
            own = [unit if rank == size - 1 else keep(unit)]
        if place == size - 1:
            yield own.pop()


class RankOrder:
    """Sampler of one rank's share of the order of a `DataLoader`'s batches.

    Args:
        loader: The user's loader of a map-style dataset.
        processes: Connected processes of the run.
        seed: Seed of orders that no generator of the user's own decides.
    """

    def __init__(self, loader: DataLoader[Any], processes: Processes, seed: int) -> None:
        sampler = loader.batch_sampler
        self._units: Any = loader.sampler if sampler is None else sampler
        self._rank, self._rendezvous = processes.rank, processes.rendezvous
        self._drop_last = drops_last(loader)
        self._seed, self._epoch, self._turn = seed, 0, 0
        self._share = Share()
        self._generator = torch.Generator()
        self._seeded = _seeded_order(self._units, self._generator)
        inner = getattr(self._units, "sampler", None)
        names = [type(part).__name__ for part in (self._units, inner) if part is not None]
        self.description: dict[str, Any] = {"sampler": " of ".join(names)}
        """Settings that must be equal on all ranks."""
        if self._seeded is None:
            # A rank that reads further ahead than rank 0 would wait for indices while rank 0 waits
            # in a collective.
            for setting in ("num_workers", "prefetch_factor"):
                self.description[setting] = getattr(loader, setting)

    @property
    def is_seeded(self) -> bool:
        """True if the seed and the number of the epoch decide the order."""
        return self._seeded is not None

    def begin(self, epoch: int, turn: int, share: Share) -> None:
        """Set the number of the epoch that is iterated next, of its exchange, and its record."""
        self._epoch, self._turn, self._share = epoch, turn, share

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return rounds(len(self._units), self._rank.world_size, drop_last=self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices of this rank's batches."""
        self._generator.manual_seed(seed_of(self._seed, self._epoch))
        units = self._drawn_by_rank_0(self._turn) if self._seeded is None else self._seeded
        rank, size = self._rank.rank, self._rank.world_size
        return ranks_share(units, rank, size, share=self._share, drop_last=self._drop_last)

    def _drawn_by_rank_0(self, turn: int) -> Iterator[Any]:
        """Yield the indices of all batches as rank 0 draws them.

        They are sent in windows, which grow from one round on, so that a sampler may be endless.
        """
        size, num_rounds = self._rank.world_size, 1
        drawn = iter(self._units) if self._rank.rank == 0 else iter(())
        for number in itertools.count():
            key = f"{turn}/order/{number}"
            if self._rank.rank == 0:
                window = [_indices(unit) for unit in itertools.islice(drawn, num_rounds * size)]
                with self._rendezvous.connection():
                    self._rendezvous.store.set(key, json.dumps(window))
            else:
                window = self._received(key)
            yield from window
            if len(window) < num_rounds * size:
                return
            num_rounds = min(2 * num_rounds, _MAX_ROUNDS)

    def _received(self, key: str) -> list[Any]:
        """Return a window that rank 0 sends; the last reader removes it."""
        rendezvous, read = self._rendezvous, f"{key}/read"
        with rendezvous.connection():
            rendezvous.wait_for({0: key}, "the indices of the next batches of a loader")
            window: list[Any] = rendezvous.read(key)
            if rendezvous.store.add(read, 1) == self._rank.world_size - 1:
                rendezvous.store.delete(key, read)
        return window


def _seeded_order(units: Any, generator: torch.Generator) -> Iterable[Any] | None:
    """Return *units* with random numbers from *generator*; None if they may draw other numbers."""
    batched = type(units) is BatchSampler
    sampler: Any = units.sampler if batched else units
    if type(sampler) is SequentialSampler:
        return units  # type: ignore[no-any-return]
    if type(sampler) not in _SEEDED or sampler.generator is not None:
        return None
    sampler = copy.copy(sampler)
    sampler.generator = generator
    if not batched:
        return sampler  # type: ignore[no-any-return]
    seeded = copy.copy(units)
    seeded.sampler = sampler
    return seeded  # type: ignore[no-any-return]


def _indices(unit: Any) -> Any:
    """Return an index or the indices of a batch as integers.

    Raises:
        ConfigError: They are not integers.
    """
    try:
        if hasattr(unit, "__index__") and not getattr(unit, "shape", ()):
            return operator.index(unit)
        return [operator.index(index) for index in unit]
    except TypeError as cause:
        raise ConfigError(
            "the sampler of a loader does not give integers",
            why=f"it gave {unit!r:.80}; rank 0 sends the indices of batches to the other ranks",
            hint="let the sampler give the samples of its rank, and pass `shard=False`",
        ) from cause


def replace_order(
    loader: DataLoader[Any], order: RankOrder | None, generator: torch.Generator | None
) -> DataLoader[Any]:
    """Return a `DataLoader` with all settings of *loader*, which stays as it is, and another order.

    It is a copy, as subclasses have settings that no constructor of torch takes.

    Args:
        loader: The user's loader.
        order: Sampler in the place of the user's; None: unchanged.
        generator: Generator of the seeds of worker processes; None: unchanged.
    """
    copied = copy.copy(loader)
    values: dict[str, Any] = {"_iterator": None}  # persistent workers belong to the user's loader
    if order is not None:
        values["sampler" if loader.batch_sampler is None else "batch_sampler"] = order
    if generator is not None:
        values["generator"] = generator
    vars(copied).update(values)  # assignments to these attributes are refused
    return copied


def sharding_sampler(loader: Any, rank: RankInfo) -> Any:
    """Return the sampler of *loader* that gives each rank its share already; None if none does.

    Raises:
        ConfigError: It shards for another number of ranks, or for another rank.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    for sampler in (batch_sampler, inner, getattr(loader, "sampler", None)):
        number, own = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if not isinstance(number, int) or not isinstance(own, int):
            continue
        if (number, own) != (rank.world_size, rank.rank):
            raise ConfigError(
                f"the `{type(sampler).__name__}` of a loader shards for rank {own} of {number}",
                why=f"this process is rank {rank.rank} of {rank.world_size}",
                hint="leave the sampler out (`shuffle=True`), as the loader is sharded by the "
                "ranks of the run anyway, or create the sampler with their number",
            )
        return sampler
    return None


def checked_to_end(batches: Iterable[Any], rendezvous: Rendezvous, turn: int) -> Iterator[Any]:
    """Yield *batches*; at the end wait for the other ranks, and compare the numbers of batches.

    `EPOCH_END` is yielded before the wait, so that a rank can look for the end without it.

    A rank that reads more batches than another one may wait for it in a collective: a thread
    announces its number, as soon as the other rank has announced its end.

    Args:
        batches: Batches of this rank, an unknown number.
        rendezvous: Connection of the processes.
        turn: Number of the exchange.

    Raises:
        RunError: The ranks read different numbers of batches.
    """
    from lmcore.runtime.store import StoreError

    rank, store = rendezvous.rank, rendezvous.store
    ends = {other: f"{turn}/end/{other}" for other in range(rank.world_size)}
    beats = {other: f"{turn}/beats/{other}" for other in ends}
    count = 0

    def announce() -> None:
        with contextlib.suppress(StoreError):  # the process with the store is gone or frozen
            store.add(beats[rank.rank], 1)
            found = store.get_all([*ends.values()])
            ended = [int(end.split()[0]) for end in found if end and end != _LEFT]
            if ended and count > min(ended):
                store.set(ends[rank.rank], f"{count} or more")

    lost = "ranks with different numbers of batches wait for --distributed-timeout-minutes"
    with periodically(announce, _BEAT_SECONDS, name="lmcore-batches", without=lost):
        try:
            for batch in batches:
                count += 1
                yield batch
            yield EPOCH_END
        except GeneratorExit:  # by `break`: other ranks may go on to the end without this one
            with contextlib.suppress(StoreError):
                store.set(ends[rank.rank], _LEFT)
            raise
        with rendezvous.connection():
            store.set(ends[rank.rank], str(count))
            rendezvous.wait_for(
                ends, "the end of an epoch on all ranks", heartbeats=beats, in_order=False
            )
            found = store.get_all([*ends.values()])
    numbers = {other: end.decode() for other, end in enumerate(found) if end and end != _LEFT}
    if len(set(numbers.values())) > 1:
        lines = [f"rank {other}: {number}" for other, number in numbers.items()]
        raise RunError(
            "the ranks read different numbers of batches in an epoch",
            why="\n".join(lines),
            hint="give every rank the same number of batches, or a dataset with a length",
        )
