"""One document on its way through the steps: its line, its fields, and where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lmcore.data.input.batch import LineBatch, TextBatch
from lmcore.data.input.document import key_missing, record_of, require_text
from lmcore.data.input.problem import BadDocument, Problem

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
    """A document between two segments: its JSON without a line end, and its place."""

    source: str
    number: int
    raw: bytes


@dataclass(frozen=True)
class EntryBatch:
    """Consecutive documents that an earlier segment has let through."""

    entries: tuple[Entry, ...]

    @property
    def where(self) -> str:
        """The documents' place, for messages."""
        first, last = self.entries[0], self.entries[-1]
        return f"`{first.source}` line {first.number} to `{last.source}` line {last.number}"


@dataclass(frozen=True)
class FieldKeys:
    """Where a document's text is, and its address if any step wants it."""

    text: str = "text"
    url: str | None = None


@dataclass(slots=True)
class Document:
    """A document inside a segment.

    Attributes:
        source: The file that it came from.
        number: Its line there, or row, from 1.
        raw: Its JSON as it was read, without a line end.
        record: Its fields.
        text: The text, which steps may have changed.
        url: The address, where a step wants one.
        changed: Whether `text` is another than the record's.
    """

    source: str
    number: int
    raw: bytes
    record: dict[str, Any]
    text: str
    url: str = ""
    changed: bool = False

    def line(self, key: str) -> bytes:
        """Return its JSON: the very bytes that were read, unless the text was changed."""
        if not self.changed:
            return self.raw
        return to_line({**self.record, key: self.text})


@dataclass(frozen=True, slots=True)
class Drop:
    """The verdict of a step that leaves a document out; `reason` is counted, `detail` is not."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Replace:
    """The verdict of a step that changes a document's text, or parts it into several.

    Attributes:
        texts: What takes its place.
        removed: What was cut out of it.
        reason, detail: Why something was cut.
    """

    texts: tuple[str, ...]
    removed: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""


Verdict = Drop | Replace | None
"""What a step says of a document; None keeps it as it is."""


class DocumentStep(Protocol):
    """A step that looks at one document at a time; it is sent to worker processes."""

    def judge(self, document: Document) -> Verdict:
        """Return what becomes of *document*."""
        ...


def to_line(record: dict[str, Any]) -> bytes:
    """Return *record* as JSON in UTF-8, or in ASCII where it holds half a surrogate pair."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()


def documents_of(
    batch: LineBatch | TextBatch | EntryBatch, keys: FieldKeys
) -> Iterator[Document | Problem]:
    """Yield the documents of *batch*, and a problem for each that cannot be read."""
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
        BadDocument: It is not there, or no text.
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
