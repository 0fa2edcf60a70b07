"""Position in an epoch of a loader, which a checkpoint keeps: `rt.save(..., batches=batches)`.

A resumed epoch draws its order from the random states that the epoch began with, leaves out the
batches that were taken, and continues with the random states of the checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler

from lmcore.base.errors import ConfigError, counted

__all__ = [
    "Position",
    "order_of",
    "random_states_at_begin",
    "random_states_of",
    "rest_of",
    "without_first",
]

_KEYS = frozenset({"epoch", "taken", "ranks", "batches", "order", "random"})


@dataclass(frozen=True)
class Position:
    """Position in the order of a loader's batches.

    Attributes:
        epoch: Number of the epoch; None if nobody has counted it.
        taken: Number of batches of each rank that were taken in it.
        ranks: Number of ranks.
        batches: Number of batches in an epoch, of all ranks; None if it is unknown.
        order: Name of the order, as of `order_of`.
        random: Random states at the beginning of the epoch, as of `random_states_of`.
    """

    epoch: int | None
    taken: int
    ranks: int
    batches: int | None
    order: str
    random: Mapping[str, Tensor]

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """Return the position of a state dict.

        Raises:
            ConfigError: It is of another kind of object.
        """
        if not isinstance(state, Mapping) or set(state) != _KEYS:
            raise ConfigError(
                "`load_state_dict` of a loader was given the state of another object",
                hint="give each object by the name that it has in `save`",
            )
        return cls(**state)

    def in_loader(self, ranks: int, batches: int | None, order: str) -> Position:
        """Return the position in a loader of this run.

        With another number of ranks, batches of a round that was not taken by all come again.

        Args:
            ranks: Number of ranks.
            batches: Number of batches in an epoch; None if it is unknown.
            order: Name of the order, as of `order_of`.

        Raises:
            ConfigError: The loader has another order of batches.
        """
        differing = {
            "batches in an epoch": (self.batches, batches),
            "order": (self.order, order),
            "ranks": (self.ranks, ranks) if order == "own" else (0, 0),
        }
        lines = [
            f"{name}: {saved} then, {own} now"
            for name, (saved, own) in differing.items()
            if saved != own
        ]
        if self.taken and lines:
            raise ConfigError(
                "a loader cannot go on in the middle of the checkpoint's epoch: its batches are "
                "others",
                why="\n".join(lines),
                hint="use the same dataset, batch size, sampler and seed; or leave the loader out "
                "of `load`, and begin the epoch again",
            )
        taken = self.taken * self.ranks // ranks
        return Position(self.epoch, taken, ranks, batches, order, self.random)


class RestOfEpoch:
    """Sampler of the units of another one, without the first ones.

    Args:
        units: Sampler, or batch sampler.
        skipped: Number of units that are left out.
    """

    def __init__(self, units: Any, skipped: int) -> None:
        self._units, self._skipped = units, skipped
        self._rest: Iterator[Any] = iter(())
        self._is_drawn = False

    def __len__(self) -> int:
        """Return the number of units of a whole epoch."""
        return len(self._units)

    def __iter__(self) -> Iterator[Any]:
        self._rest, self._is_drawn = iter(self._units), False
        return self

    def __next__(self) -> Any:
        self.draw()
        return next(self._rest)

    def draw(self) -> None:
        """Leave the units out now, by which a random sampler draws its order.

        A loader draws the seed of its workers between `iter` and this, as in any epoch.
        """
        if not self._is_drawn:
            self._is_drawn = True
            for _ in itertools.islice(self._rest, self._skipped):
                pass


def rest_of(source: Any, taken: int, *, indexed: bool) -> tuple[Any, RestOfEpoch | None]:
    """Return a loader of the rest of an epoch, and its sampler; *source* itself has none.

    Args:
        source: Loader of this rank's batches.
        taken: Number of batches that are left out.
        indexed: True if *source* is a `DataLoader` of a map-style dataset.
    """
    if not indexed:
        return source, None
    place = "sampler" if source.batch_sampler is None else "batch_sampler"
    rest = RestOfEpoch(getattr(source, place), taken)
    copied = copy.copy(source)
    vars(copied).update({place: rest, "_iterator": None})  # assignments are refused
    return copied, rest


def order_of(loader: Any, seed: int | None, *, indexed: bool, shards_itself: bool) -> str:
    """Return the name of the order of a loader's batches: of the generator that decides it.

    Args:
        loader: The user's loader.
        seed: Seed that decides the order; None if another generator does.
        indexed: True if *loader* is a `DataLoader` of a map-style dataset.
        shards_itself: True if the loader gives each rank its own samples.
    """
    if shards_itself:
        return "own"
    if not indexed:
        return "stream"
    units: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    inner = units.sampler if type(units) is BatchSampler else units
    if type(inner) is SequentialSampler:
        return "sequence"
    return "drawn" if seed is None else f"seed {seed}"


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators of a loader that decide an order, by name."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    single = loader if batch_sampler is None else batch_sampler
    parts = {
        "loader": loader,
        "batch_sampler": batch_sampler,
        "sampler": getattr(single, "sampler", None),
    }
    found = {name: getattr(part, "generator", None) for name, part in parts.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}


def random_states_of(loader: Any) -> dict[str, Tensor]:
    """Return copies of the random states that decide an order: of the host and of generators."""
    states = {name: one.get_state() for name, one in generators_of(loader).items()}
    return {"host": torch.get_rng_state(), **states}


@contextlib.contextmanager
def random_states_at_begin(loader: Any, random: Mapping[str, Tensor]) -> Iterator[None]:
    """Set the random states of an epoch's beginning; the host's are as before after the context."""
    before = torch.get_rng_state()
    for name, generator in generators_of(loader).items():
        if name in random:
            generator.set_state(random[name])
    torch.set_rng_state(random["host"])
    try:
        yield
    finally:
        torch.set_rng_state(before)


def without_first(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Read the first batches, and return the iterator of the others.

    Raises:
        ConfigError: There are fewer.
    """
    read = sum(1 for _ in itertools.islice(batches, count))
    if read < count:
        raise ConfigError(
            f"a loader cannot go on after {counted(count, 'batch', 'batches')}: it has {read}",
            hint="use the same dataset and batch size as before; or leave the loader out of "
            "`load`, and begin the epoch again",
        )
    return batches
