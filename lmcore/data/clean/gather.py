"""The steps that need all documents at once: they end a segment and begin the next."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from lmcore.data.clean.counts import StepCounts, dropped_line
from lmcore.data.clean.document import Entry, EntryBatch
from lmcore.data.clean.leaders import Leaders
from lmcore.data.clean.spool import Spool
from lmcore.data.clean.work import KeyMaker, Processed

__all__ = ["Gathering", "Workplace", "count_gathered", "survivors"]


@dataclass(frozen=True)
class Workplace:
    """What a gathering step is given.

    Attributes:
        directory: Its own, for files of any size; removed afterwards.
        name: Of its row in the report.
        counts: Its row.
        tell: Takes a line about a dropped document; None where nobody wants it.
        compared: Told now and then how many pairs were compared.
    """

    directory: Path
    name: str
    counts: StepCounts
    tell: Callable[[bytes], None] | None
    compared: Callable[[int], None]


class Gathering(Protocol):
    """A step that waits for all documents before it lets the first one go."""

    @property
    def key_maker(self) -> KeyMaker | None:
        """What it wants to know of each document; runs in worker processes."""
        ...

    @property
    def has_own_row(self) -> bool:
        """Whether its row in the report is its alone, so that it counts what it sees."""
        ...

    def run(
        self, batches: Iterator[Processed], place: Workplace
    ) -> Generator[EntryBatch, None, None]:
        """Take all of *batches*, then yield what stays."""
        ...


def count_gathered(step: Gathering, place: Workplace, processed: Processed) -> None:
    """Count the documents of a batch as seen, unless the step before has."""
    if step.has_own_row:
        place.counts.seen += len(processed.entries)


def survivors(
    spool: Spool, leaders: Leaders, place: Workplace, reason: str
) -> Generator[EntryBatch, None, None]:
    """Yield the leaders of their groups, in order; the others are counted and told of."""
    with closing(spool):
        for first, block in spool.blocks():
            groups = leaders.of(first, first + len(block))
            positions = np.arange(first, first + len(block))
            stays = (groups == positions).tolist()
            kept = []
            for (entry, _), stay, leader in zip(block, stays, groups.tolist(), strict=True):
                if stay:
                    kept.append(entry)
                    continue
                place.counts.dropped[reason] += 1
                if place.tell is not None:
                    place.tell(_line(place.name, reason, entry, spool.read(leader)))
            if kept:
                yield EntryBatch(tuple(kept))


def _line(name: str, reason: str, entry: Entry, kept: Entry) -> bytes:
    return dropped_line(name, reason, entry, kept=kept)
