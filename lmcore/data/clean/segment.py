"""What is done to a batch of documents inside a segment: the part that runs in worker processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcore.data.clean.counts import StepCounts, dropped_line, problem_line
from lmcore.data.clean.document import (
    Document,
    DocumentStep,
    Drop,
    Entry,
    EntryBatch,
    FieldKeys,
    Replace,
    documents_of,
)
from lmcore.data.input.batch import LineBatch, TextBatch
from lmcore.data.input.problem import Problem, Reason

__all__ = ["AnyBatch", "KeyMaker", "Processed", "Segment", "process"]

AnyBatch = LineBatch | TextBatch | EntryBatch


class KeyMaker(Protocol):
    """Makes of documents the numbers by which a later step finds their duplicates."""

    def keys(self, documents: Sequence[Document]) -> npt.NDArray[np.uint64]:
        """Return a row for each of *documents*, which are not none."""
        ...


@dataclass(frozen=True)
class Segment:
    """Steps that look at one document at a time, and what the step after them needs.

    Attributes:
        fields: Where the documents' text is.
        steps: Each with its row in the report.
        names: The rows' names.
        key_maker: For the step that ends the segment.
        stop: Whether the first bad document ends the run.
        tell: Whether to tell what was dropped.
    """

    fields: FieldKeys
    steps: tuple[tuple[int, DocumentStep], ...]
    names: tuple[str, ...]
    key_maker: KeyMaker | None
    stop: bool
    tell: bool


@dataclass
class Processed:
    """What a batch gave.

    Attributes:
        entries: The documents left.
        keys: A row for each of them, where the segment makes keys.
        counts: By row of the report.
        dropped: Lines that tell of documents left out.
        bad: Documents that could not be read, by reason.
        problem: The first of them.
        documents, bytes: What came in.
    """

    entries: list[Entry] = field(default_factory=list)
    keys: npt.NDArray[np.uint64] | None = None
    counts: dict[int, StepCounts] = field(default_factory=dict)
    dropped: list[bytes] = field(default_factory=list)
    bad: Counter[Reason] = field(default_factory=Counter)
    problem: Problem | None = None
    documents: int = 0
    bytes: int = 0


def process(batch: AnyBatch, segment: Segment) -> Processed:
    """Take the documents of *batch* through the steps of *segment*."""
    done = Processed(counts={row: StepCounts() for row, _ in segment.steps}, bytes=_size(batch))
    left: list[Document] = []
    for document in documents_of(batch, segment.fields):
        if isinstance(document, Problem):
            done.bad[document.reason] += 1
            done.problem = done.problem or document
            if segment.tell:
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
    """Return what the steps leave of *document*."""
    documents = [document]
    for row, step in segment.steps:
        counts = done.counts[row]
        left: list[Document] = []
        for one in documents:
            counts.seen += 1
            verdict = step.judge(one)
            if verdict is None:
                left.append(one)
                continue
            if segment.tell:
                _tell(one, verdict, segment.names[row], segment, done)
            if isinstance(verdict, Drop):
                counts.dropped[verdict.reason] += 1
            else:
                counts.changed += 1
                counts.added += len(verdict.texts) - 1
                left.extend(_replaced(one, verdict))
        documents = left
    return documents


def _tell(
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
