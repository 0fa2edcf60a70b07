"""Interface of corpus steps, which need all documents at once and end a segment."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmcore_data_tools.clean.counts import StepCounts, dropped_line
from lmcore_data_tools.clean.document import EntryBatch
from lmcore_data_tools.clean.document_store import DocumentStore
from lmcore_data_tools.clean.segment import KeyMaker, Processed
from lmcore_data_tools.clean.union_find import UnionFind

__all__ = ["CorpusStep", "StepContext", "count_seen", "keep_representatives"]


@dataclass(frozen=True)
class StepContext:
    """Arguments of a corpus step.

    Attributes:
        directory: directory for its temporary files; removed afterwards.
        name: name of its row in the report.
        counts: counts of its row.
        report_dropped: takes a line about a dropped document; None: not needed.
        compared: takes the number of compared pairs, from time to time.
    """

    directory: Path
    name: str
    counts: StepCounts
    report_dropped: Callable[[bytes], None] | None
    compared: Callable[[int], None]


class CorpusStep(Protocol):
    """Step that reads all documents before it yields the first one."""

    @property
    def key_maker(self) -> KeyMaker | None:
        """Function for the keys of each document, for worker processes; None: no keys."""
        ...

    @property
    def has_own_row(self) -> bool:
        """True if its row in the report is not shared with a document step, which counts for it."""
        ...

    def run(
        self, batches: Iterator[Processed], context: StepContext
    ) -> Generator[EntryBatch, None, None]:
        """Read all *batches*, then yield the remaining documents."""
        ...


def count_seen(step: CorpusStep, context: StepContext, processed: Processed) -> None:
    """Count the documents of a batch as seen, unless the document step of the row has."""
    if step.has_own_row:
        context.counts.seen += len(processed.entries)


def keep_representatives(
    documents: DocumentStore, clusters: UnionFind, context: StepContext, reason: str
) -> Generator[EntryBatch, None, None]:
    """Yield the representatives of the clusters, in order; count and report the other documents.

    All are reported before the first one is yielded: how far ahead the consumer reads depends on
    the number of workers.
    """
    if context.report_dropped is not None:
        for first, block in documents.blocks():
            found = clusters.representatives(first, first + len(block)).tolist()
            for position, ((entry, _), kept) in enumerate(zip(block, found, strict=True), first):
                if kept != position:
                    line = dropped_line(context.name, reason, entry, kept=documents.read(kept))
                    context.report_dropped(line)
    for first, block in documents.blocks():
        found = clusters.representatives(first, first + len(block)).tolist()
        remaining = [
            entry
            for position, ((entry, _), kept) in enumerate(zip(block, found, strict=True), first)
            if kept == position
        ]
        context.counts.dropped[reason] += len(block) - len(remaining)
        if remaining:
            yield EntryBatch(tuple(remaining))
