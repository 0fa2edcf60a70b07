"""Segments of the chain: the document steps that worker processes apply to each batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcore.data.input.batch import LineBatch, TextBatch
from lmcore.data.input.problem import InputProblem, Reason
from lmcore_data_tools.clean.counts import StepCounts, dropped_line, problem_line
from lmcore_data_tools.clean.document import (
    Document,
    DocumentStep,
    Drop,
    Entry,
    EntryBatch,
    FieldKeys,
    Replace,
    documents_of,
)

__all__ = ["AnyBatch", "KeyMaker", "Processed", "Segment", "process"]

AnyBatch = LineBatch | TextBatch | EntryBatch


class KeyMaker(Protocol):
    """Function from documents to the keys by which a corpus step finds duplicates."""

    def keys(self, documents: Sequence[Document]) -> npt.NDArray[np.uint64]:
        """Return the keys, (documents, columns), of at least one document."""
        ...


@dataclass(frozen=True)
class Segment:
    """Document steps of a segment, and the keys for the corpus step after them.

    Attributes:
        fields: keys of the text and URL.
        steps: document steps, each with its row in the report.
        names: names of all rows.
        key_maker: function for the keys of the corpus step.
        stop: end the run at the first bad document.
        report_dropped: describe dropped documents.
    """

    fields: FieldKeys
    steps: tuple[tuple[int, DocumentStep], ...]
    names: tuple[str, ...]
    key_maker: KeyMaker | None
    stop: bool
    report_dropped: bool


@dataclass
class Processed:
    """Result of a segment for a batch.

    Attributes:
        entries: remaining documents.
        keys: (entries, columns), keys for the corpus step.
        counts: counts by row of the report.
        dropped: lines that describe dropped documents.
        bad: number of unreadable documents by reason.
        problem: the first unreadable document.
        documents, bytes: number of documents and bytes of the batch.
    """

    entries: list[Entry] = field(default_factory=list)
    keys: npt.NDArray[np.uint64] | None = None
    counts: dict[int, StepCounts] = field(default_factory=dict)
    dropped: list[bytes] = field(default_factory=list)
    bad: Counter[Reason] = field(default_factory=Counter)
    problem: InputProblem | None = None
    documents: int = 0
    bytes: int = 0


def process(batch: AnyBatch, segment: Segment) -> Processed:
    """Apply the steps of *segment* to the documents of *batch*."""
    done = Processed(counts={row: StepCounts() for row, _ in segment.steps}, bytes=_size(batch))
    left: list[Document] = []
    for document in documents_of(batch, segment.fields):
        if isinstance(document, InputProblem):
            done.bad[document.reason] += 1
            done.problem = done.problem or document
            if segment.report_dropped:
                done.dropped.append(problem_line(document))
            if segment.stop:
                break
            continue
        done.documents += 1
        left.extend(_through(document, segment, done))
    done.entries = [_entry(document, segment) for document in left]
    if segment.key_maker is not None and left:
        done.keys = segment.key_maker.keys(left)
    return done


def _size(batch: AnyBatch) -> int:
    if isinstance(batch, EntryBatch):
        return sum(len(entry.raw) for entry in batch.entries)
    return batch.size


def _entry(document: Document, segment: Segment) -> Entry:
    return Entry(document.source, document.number, document.line(segment.fields.text))


def _through(document: Document, segment: Segment, done: Processed) -> Iterable[Document]:
    """Return the documents that remain of *document* after the steps."""
    documents = [document]
    for row, step in segment.steps:
        counts = done.counts[row]
        left: list[Document] = []
        for current in documents:
            counts.seen += 1
            verdict = step.judge(current)
            if verdict is None:
                left.append(current)
                continue
            if segment.report_dropped:
                _report(current, verdict, segment.names[row], segment, done)
            if isinstance(verdict, Drop):
                counts.dropped[verdict.reason] += 1
            else:
                counts.changed += 1
                counts.added += len(verdict.texts) - 1
                left.extend(_replaced(current, verdict))
        documents = left
    return documents


def _report(
    document: Document, verdict: Drop | Replace, name: str, segment: Segment, done: Processed
) -> None:
    removed = verdict.removed if isinstance(verdict, Replace) else ()
    if isinstance(verdict, Drop) or removed:
        entry = _entry(document, segment)
        line = dropped_line(name, verdict.reason, entry, detail=verdict.detail, removed=removed)
        done.dropped.append(line)


def _replaced(document: Document, verdict: Replace) -> Iterable[Document]:
    several = len(verdict.texts) > 1
    for number, text in enumerate(verdict.texts, start=1):
        yield Document(
            document.source,
            document.number,
            document.raw,
            {**document.record, "piece": number} if several else document.record,
            text,
            document.url,
            changed=True,
        )
