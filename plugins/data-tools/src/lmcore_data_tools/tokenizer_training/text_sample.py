"""Training text of a vocabulary: lines of any input, sampled if there are too many.

Memory is bounded: when the kept lines exceed the limit, about half of them are dropped, and the
same fraction of the following ones.  A hash of the line number decides, so that the same input
gives the same sample.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lmcore.base.errors import DataError, counted
from lmcore.data.input.batch import Batch, LineBatch
from lmcore.data.input.document import record_of, require_utf8, text_of
from lmcore.data.input.files import find_inputs
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import BadDocument
from lmcore.data.input.read import read_input

__all__ = ["ReadProgress", "TextSample", "read_sample"]

_LINES = re.compile(r"[^\n]*\n+|[^\n]+")
_MAX_LINE_ENDS = 8
_MAX_LINE_BYTES = 4000  # SentencePiece's trainers skip longer ones
_MASK = 2**64 - 1


@dataclass(frozen=True)
class ReadProgress:
    """Progress of reading the text."""

    documents: int
    bytes: int
    kept_bytes: int
    seconds: float

    def line(self) -> str:
        """Return a progress line."""
        speed = self.bytes / 2**20 / max(self.seconds, 1e-9)
        return (
            f"read {counted(self.documents, 'document')}, {self.bytes / 2**20:,.1f} MiB of text "
            f"({speed:.1f} MiB/s), kept {self.kept_bytes / 2**20:,.1f} MiB"
        )


@dataclass
class TextSample:
    """Sampled lines, and counts of the text that was read.

    Attributes:
        limit: size limit of the sample, in bytes.
        lines: sampled lines with their line ends, split to the size that trainers accept.
        documents: number of documents read, as `lmcore data prepare` counts them by default.
        bytes: size of their text, in bytes.
        kept_bytes: size of the sample, in bytes.
        skipped: number of documents that could not be used, by reason.
    """

    limit: int
    lines: list[str] = field(default_factory=list)
    documents: int = 0
    bytes: int = 0
    kept_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    _numbers: list[int] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _seen: int = 0
    _bound: int = _MASK

    def add(self, text: str) -> None:
        """Add the lines of a document, or a part of them."""
        for line in _lines(text):
            size = len(line) if line.isascii() else len(line.encode())
            self.bytes += size
            number = _hash(self._seen)
            self._seen += 1
            if number > self._bound:
                continue
            self.lines.append(line)
            self._numbers.append(number)
            self._sizes.append(size)
            self.kept_bytes += size
            if self.kept_bytes > self.limit:
                self._thin_out()

    def _thin_out(self) -> None:
        while self.kept_bytes > self.limit:
            self._bound //= 2
            kept = [i for i, number in enumerate(self._numbers) if number <= self._bound]
            self.lines = [self.lines[i] for i in kept]
            self._numbers = [self._numbers[i] for i in kept]
            self._sizes = [self._sizes[i] for i in kept]
            self.kept_bytes = sum(self._sizes)


def read_sample(
    inputs: Sequence[str],
    *,
    keys: tuple[str, ...],
    limit: int,
    on_error: Literal["stop", "skip"] = "stop",
    input_format: str = "auto",
    progress: Callable[[ReadProgress], None] | None = None,
) -> TextSample:
    """Read the whole input and keep at most *limit* bytes of its lines.

    Args:
        inputs: files, patterns, directories, or `-` for standard input.
        keys: keys or columns whose text is read.
        limit: size limit of the sample, in bytes.
        on_error: stop at a document that cannot be used, or skip it.
        input_format: one of `lmcore.data.input.files.FORMATS`, or `auto`.
        progress: called after each batch of documents.

    Raises:
        DataError: no text, a document that cannot be used, or a damaged file.
    """
    sample = TextSample(limit)
    started = time.monotonic()
    # Plain text line by line, since it may be long: the boundaries of documents do not matter.
    options = InputOptions(keys=keys, document_per="line", skip=on_error == "skip")
    for file in find_inputs(inputs, input_format):
        before, texts = sample.documents, 0
        for batch in read_input([file], options):
            for text in _texts(batch, keys, sample.skipped, stop=on_error == "stop"):
                sample.add(text)
                texts += 1
            of_file = min(texts, 1) if file.format == "text" else texts // len(keys)
            sample.documents = before + of_file
            if progress is not None:
                seconds = time.monotonic() - started
                progress(ReadProgress(sample.documents, sample.bytes, sample.kept_bytes, seconds))
    if not any(map(str.strip, sample.lines)):
        raise DataError(
            "the input has no text",
            why=f"{counted(sample.documents, 'document')} in "
            + (f"`{inputs[0]}`" if len(inputs) == 1 else counted(len(inputs), "input")),
            hint="check `--input` and `--json-keys`",
        )
    return sample


def _texts(
    batch: Batch, keys: tuple[str, ...], skipped: Counter[str], *, stop: bool
) -> Iterator[str]:
    for problem in batch.problems:
        if stop:
            raise problem.error()
        skipped[problem.reason] += 1
    if not isinstance(batch, LineBatch):
        for column in batch.columns:
            yield from _ended(column, batch.numbers) if batch.unit == "line" else column
        return
    for number, line in enumerate(batch.lines, start=batch.first_line):
        if line.isspace():
            continue
        try:
            yield from [require_utf8(text) for text in _of_line(line, keys)]
        except BadDocument as bad:
            if stop:
                raise bad.at(batch.source, number).error() from None
            skipped[bad.reason] += 1


def _ended(texts: Sequence[str], numbers: Sequence[int]) -> Iterator[str]:
    """Yield lines of plain text with their line ends, with following blank lines.

    The line numbers give the number of blank lines.  A byte-level vocabulary has tokens for several
    line ends.
    """
    followed_by = [*numbers[1:], *(last + 1 for last in numbers[-1:])]
    for text, number, following in zip(texts, numbers, followed_by, strict=True):
        yield text + "\n" * min(following - number, _MAX_LINE_ENDS)


def _of_line(line: bytes, keys: tuple[str, ...]) -> list[str]:
    record = record_of(line)
    texts = [text_of(record, key, "--json-keys") for key in keys]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            detail = f"the lone surrogate U+{ord(text[error.start]):04X} is not a character"
            raise BadDocument("not encodable", detail) from None
    return texts


def _lines(text: str) -> Iterator[str]:
    """Yield the lines with their line ends, with following blank lines.

    Long lines are split, before a space if possible.
    """
    for rest in _LINES.findall(text):
        while len(rest) * 4 > _MAX_LINE_BYTES and len(rest.encode()) > _MAX_LINE_BYTES:
            part = rest.encode()[:_MAX_LINE_BYTES].decode(errors="ignore")
            part = part[: part.rfind(" ")] if part.rfind(" ") > 0 else part
            yield part
            rest = rest[len(part) :]  # noqa: PLW2901  # the remaining line
        yield rest


def _hash(number: int) -> int:
    """Return a 64-bit hash: the finalizer of SplitMix64."""
    x = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
