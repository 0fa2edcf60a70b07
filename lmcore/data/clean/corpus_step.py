"""The steps that need all documents at once: they end a segment and begin the next."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmcore.data.clean.counts import StepCounts, dropped_line
from lmcore.data.clean.document import EntryBatch
from lmcore.data.clean.document_store import DocumentStore
from lmcore.data.clean.segment import KeyMaker, Processed
from lmcore.data.clean.union_find import UnionFind

__all__ = ["CorpusStep", "StepContext", "count_seen", "keep_representatives"]


@dataclass(frozen=True)
class StepContext:
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


class CorpusStep(Protocol):
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
        self, batches: Iterator[Processed], context: StepContext
    ) -> Generator[EntryBatch, None, None]:
        """Take all of *batches*, then yield what stays."""
        ...


def count_seen(step: CorpusStep, context: StepContext, processed: Processed) -> None:
    """Count the documents of a batch as seen, unless the step before has."""
    if step.has_own_row:
        context.counts.seen += len(processed.entries)


def keep_representatives(
    documents: DocumentStore, clusters: UnionFind, context: StepContext, reason: str
) -> Generator[EntryBatch, None, None]:
    """Yield the clusters of their groups, in order; the others are counted and told of.

    All are told of before the first leader is yielded: how far ahead clusters are asked for depends
    on the number of workers.
    """
    if context.tell is not None:
        for first, block in documents.blocks():
            groups = clusters.representatives(first, first + len(block)).tolist()
            for position, ((entry, _), leader) in enumerate(zip(block, groups, strict=True), first):
                if leader != position:
                    kept = documents.read(leader)
                    context.tell(dropped_line(context.name, reason, entry, kept=kept))
    for first, block in documents.blocks():
        groups = clusters.representatives(first, first + len(block)).tolist()
        stay = [
            entry
            for position, ((entry, _), leader) in enumerate(zip(block, groups, strict=True), first)
            if leader == position
        ]
        context.counts.dropped[reason] += len(block) - len(stay)
        if stay:
            yield EntryBatch(tuple(stay))
