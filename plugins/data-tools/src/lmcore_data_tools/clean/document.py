"""Documents inside and between segments, and the interface of document steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lmcore.data.input.batch import LineBatch, TextBatch
from lmcore.data.input.document import key_missing, record_of, require_text
from lmcore.data.input.problem import BadDocument, InputProblem

__all__ = [
    "Document",
    "DocumentStep",
    "Drop",
    "Entry",
    "EntryBatch",
    "FieldKeys",
    "Replace",
    "Verdict",
    "documents_of",
    "field_of",
    "to_line",
]


class Entry(NamedTuple):
    """Document between two segments: its JSON without line end, and its position."""

    source: str
    number: int
    raw: bytes


@dataclass(frozen=True)
class EntryBatch:
    """Consecutive documents from an earlier segment."""

    entries: tuple[Entry, ...]

    @property
    def where(self) -> str:
        """Position of the documents, for messages."""
        first, last = self.entries[0], self.entries[-1]
        return f"`{first.source}` line {first.number} to `{last.source}` line {last.number}"


@dataclass(frozen=True)
class FieldKeys:
    """Keys of a document's text, and of its URL if a step needs it."""

    text: str = "text"
    url: str | None = None


@dataclass(slots=True)
class Document:
    """Document inside a segment.

    Attributes:
        source: path of its file.
        number: line or row in the file, from 1.
        raw: JSON as read, without line end.
        record: parsed fields.
        text: text, which steps may have changed.
        url: URL, if a step needs it.
        changed: True if `text` differs from the record's.
    """

    source: str
    number: int
    raw: bytes
    record: dict[str, Any]
    text: str
    url: str = ""
    changed: bool = False

    def line(self, key: str) -> bytes:
        """Return the JSON of the document: the original bytes unless the text was changed."""
        if not self.changed:
            return self.raw
        return to_line({**self.record, key: self.text})


@dataclass(frozen=True, slots=True)
class Drop:
    """Verdict to drop a document; `reason` is counted, `detail` is only written."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Replace:
    """Verdict to change a document's text, or to divide it into several.

    Attributes:
        texts: new texts.
        removed: passages that were cut out.
        reason, detail: cause of the cuts.
    """

    texts: tuple[str, ...]
    removed: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""


Verdict = Drop | Replace | None
"""Result of a step for a document; None keeps it unchanged."""


class DocumentStep(Protocol):
    """Step on one document at a time; it is pickled for worker processes."""

    def judge(self, document: Document) -> Verdict:
        """Return the verdict on *document*."""
        ...


def to_line(record: dict[str, Any]) -> bytes:
    """Return *record* as JSON in UTF-8, or in ASCII if it has a lone surrogate."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()


def documents_of(
    batch: LineBatch | TextBatch | EntryBatch, keys: FieldKeys
) -> Iterator[Document | InputProblem]:
    """Yield the documents of *batch*, and a problem for each unreadable one."""
    if isinstance(batch, EntryBatch):
        for source, number, raw in batch.entries:
            yield _document(source, number, raw, keys)
        return
    if isinstance(batch, TextBatch):
        names = [keys.text] if keys.url is None else [keys.text, keys.url]
        for number, *values in zip(batch.numbers, *batch.columns, strict=True):
            record = dict(zip(names, values, strict=True))
            yield Document(batch.source, number, to_line(record), record, *values)
    else:
        for number, line in enumerate(batch.lines, start=batch.first_line):
            if line.isspace():
                continue
            try:
                yield _document(batch.source, number, line.rstrip(b"\r\n"), keys)
            except BadDocument as bad:
                yield bad.at(batch.source, number)
    yield from batch.problems


def _document(source: str, number: int, raw: bytes, keys: FieldKeys) -> Document:
    record = record_of(raw)
    text = field_of(record, keys.text, flag="--key")
    url = "" if keys.url is None else field_of(record, keys.url, flag="--url-key")
    return Document(source, number, raw, record, text, url)


def field_of(record: dict[str, Any], key: str, *, flag: str) -> str:
    """Return the text under *key*, which may lead into inner objects: `metadata.url`.

    Raises:
        BadDocument: the key is missing, or its value is not a string.
    """
    value: Any = record
    if key in record:
        value = record[key]
    else:
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                raise key_missing(key, record, flag)
            value = value[name]
    return require_text(key, value)
