"""From the documents that a format's reader finds to batches of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcore.data.input.batch import TextBatch
from lmcore.data.input.compression import BOM
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import BadDocument, Problem, Unit
from lmcore.errors import nearest

__all__ = [
    "InputDocument",
    "batch_documents",
    "byte_order_mark",
    "key_missing",
    "record_of",
    "require_text",
    "require_utf8",
    "text_of",
    "unusable_file",
]

_SHOWN_KEYS = 10


@dataclass(frozen=True, slots=True)
class InputDocument:
    """One document of a file.

    Attributes:
        number: Its place, in the reader's unit, from 1.
        size: Bytes of the input that it takes.
        found: The text of each key, or why there is none.
    """

    number: int
    size: int
    found: tuple[str, ...] | BadDocument


def batch_documents(
    file: InputFile,
    options: InputOptions,
    unit: Unit,
    documents: Iterable[InputDocument],
    position: Callable[[], int],
) -> Generator[TextBatch, None, None]:
    """Yield the documents in batches; the first bad one is the last thing unless it is skipped.

    What came before the files's damage is yielded before the error is raised.
    """
    batch = _Open(file, options, unit)
    try:
        for document in documents:
            batch.add(document)
            if batch.problems and not options.skip:
                break
            if batch.size >= options.batch_bytes:
                yield batch.closed(position())
                batch = _Open(file, options, unit)
    except Exception:
        if batch.size:
            yield batch.closed(position())
        raise
    if batch.size or batch.problems:
        yield batch.closed(position())


class _Open:
    """A batch that is being filled."""

    def __init__(self, file: InputFile, options: InputOptions, unit: Unit) -> None:
        self._source, self._unit, self._num_keys = file.path, unit, len(options.keys)
        self._numbers: list[int] = []
        self._rows: list[tuple[str, ...]] = []
        self.size = 0
        self.problems: list[Problem] = []

    def add(self, document: InputDocument) -> None:
        self.size += document.size
        if isinstance(document.found, BadDocument):
            self.problems.append(document.found.at(self._source, document.number, self._unit))
        else:
            self._numbers.append(document.number)
            self._rows.append(document.found)

    def closed(self, position: int) -> TextBatch:
        columns = tuple(zip(*self._rows, strict=True)) or ((),) * self._num_keys
        return TextBatch(
            self._source,
            self._unit,
            tuple(self._numbers),
            columns,
            self.size,
            position,
            tuple(self.problems),
        )


def unusable_file(file: InputFile, options: InputOptions, bad: BadDocument) -> TextBatch:
    """Return the batch of a file of which no document, or none after some, can be used."""
    problem = bad.at(file.path, 0, "file")
    return TextBatch(file.path, "file", (), ((),) * len(options.keys), 0, problems=(problem,))


def record_of(line: bytes) -> dict[str, Any]:
    """Return the object that a line of JSON is; raise `BadDocument` where it is none."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        detail = f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        raise BadDocument("not UTF-8", detail, "convert the file to UTF-8") from None
    except RecursionError:
        raise BadDocument("broken JSON", "it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if line.startswith(BOM):
            raise byte_order_mark() from None
        detail = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise BadDocument("broken JSON", detail) from None
    except ValueError as error:  # a number of thousands of digits
        raise BadDocument("broken JSON", str(error)) from None
    if not isinstance(record, dict):
        raise BadDocument("broken JSON", "a document is a JSON object, this line is none")
    return record


def byte_order_mark() -> BadDocument:
    """Return what is wrong with a line that begins with the mark, which only a file may."""
    return BadDocument(
        "broken JSON",
        "it begins with a byte-order mark, as where files were put together",
        r"take the marks out by `sed -i 's/^\xEF\xBB\xBF//' FILE`, or give the files one by one",
    )


def text_of(record: Mapping[str, object], key: str, flag: str) -> str:
    """Return the text under *key*, which *flag* names; raise `BadDocument` where there is none."""
    if key not in record:
        raise key_missing(key, record, flag)
    return require_text(key, record[key])


def require_text(key: str, value: object) -> str:
    """Return what stands under *key*; raise `BadDocument` where it is no text."""
    if not isinstance(value, str):
        raise BadDocument("not a string", f"`{key}` is `{json.dumps(value)[:40]}`")
    return value


def key_missing(
    key: str, there: Iterable[str], flag: str, *, called: str = "its keys"
) -> BadDocument:
    """Return what is wrong where *key*, which *flag* names, is not among those that are *there*."""
    names = list(there)
    close = nearest(key, names)
    shown = ", ".join(f"`{name[:40]}`" for name in names[:_SHOWN_KEYS]) or "none"
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    skip = "or leave what has none out with `--on-error skip`"
    hint = f"did you mean `{flag} {close}`?" if close else f"see `{flag}`, {skip}"
    return BadDocument("key missing", f"there is no `{key}`; {called}: {shown}{more}", hint)


def require_utf8(text: str) -> str:
    """Return a text that was decoded with `surrogateescape`; refuse it if it was no UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if not 0xDC80 <= code <= 0xDCFF:
            return text  # an escaped lone surrogate: the encoder tells of it
        detail = f"after {error.start} characters it has the byte 0x{code - 0xDC00:02x}"
        hint = "convert the file to UTF-8, or leave such documents out with `--on-error skip`"
        raise BadDocument("not UTF-8", detail, hint) from None
    return text
