"""Documents of any format: checks, problems, and batches of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import counted, nearest
from lmcore.data.input.batch import TextBatch
from lmcore.data.input.compression import BOM
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import BadDocument, InputProblem, Unit

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
        number: position in the file, in the reader's unit, from 1.
        size: size in the input, in bytes.
        found: text of each key, or the problem.
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
    """Yield documents in batches, up to the first bad one unless problems are skipped.

    Documents before the damage of a file are yielded before the error is raised.

    Args:
        file: the input file.
        options: options of the readers.
        unit: unit of the documents' numbers.
        documents: documents of the file.
        position: returns the number of bytes of the file read so far.
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
    """Batch that is being filled."""

    def __init__(self, file: InputFile, options: InputOptions, unit: Unit) -> None:
        self._source, self._unit, self._num_keys = file.path, unit, len(options.keys)
        self._numbers: list[int] = []
        self._rows: list[tuple[str, ...]] = []
        self.size = 0
        self.problems: list[InputProblem] = []

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
    """Return a batch with a problem of the whole file."""
    problem = bad.at(file.path, 0, "file")
    return TextBatch(file.path, "file", (), ((),) * len(options.keys), 0, problems=(problem,))


def record_of(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; raise `BadDocument` if it is not one."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        detail = f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        raise BadDocument("not UTF-8", detail, "convert the file to UTF-8") from None
    except RecursionError:
        raise BadDocument("broken JSON", "nested too deeply") from None
    except json.JSONDecodeError as error:
        if line.startswith(BOM):
            raise byte_order_mark() from None
        detail = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise BadDocument("broken JSON", detail) from None
    except ValueError as error:  # a number of thousands of digits
        raise BadDocument("broken JSON", str(error)) from None
    if not isinstance(record, dict):
        raise BadDocument("broken JSON", "a document is a JSON object, this line is not")
    return record


def byte_order_mark() -> BadDocument:
    """Return the exception for a line, other than the first, that begins with a byte-order mark."""
    return BadDocument(
        "broken JSON",
        "it begins with a byte-order mark, as after concatenation of files",
        r"remove the marks with `sed -i 's/^\xEF\xBB\xBF//' FILE`, or give the files one by one",
    )


def text_of(record: Mapping[str, object], key: str, flag: str) -> str:
    """Return the text under *key*, the value of option *flag*; raise `BadDocument` without one."""
    if key not in record:
        raise key_missing(key, record, flag)
    return require_text(key, record[key])


def require_text(key: str, value: object) -> str:
    """Return *value*, found under *key*; raise `BadDocument` if it is not a string."""
    if not isinstance(value, str):
        raise BadDocument("not a string", f"`{key}` is `{json.dumps(value)[:40]}`")
    return value


def key_missing(
    key: str, there: Iterable[str], flag: str, *, called: str = "its keys"
) -> BadDocument:
    """Return the exception for a missing key.

    Args:
        key: the key.
        there: existing keys.
        flag: command-line option of the key.
        called: noun for the existing keys in the message.
    """
    names = list(there)
    close = nearest(key, names)
    shown = ", ".join(f"`{name[:40]}`" for name in names[:_SHOWN_KEYS]) or "none"
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    skip = "or skip documents without it with `--on-error skip`"
    hint = f"did you mean `{flag} {close}`?" if close else f"check `{flag}`, {skip}"
    if "," in key and set(key.split(",")) & set(names):
        hint = f"separate keys by spaces: `{flag} {key.replace(',', ' ')}`"
    return BadDocument("key missing", f"there is no `{key}`; {called}: {shown}{more}", hint)


def require_utf8(text: str) -> str:
    """Return a text decoded with `surrogateescape`; raise `BadDocument` if it was not UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if not 0xDC80 <= code <= 0xDCFF:
            return text  # an escaped lone surrogate, which the encoder reports
        detail = f"byte 0x{code - 0xDC00:02x} after {counted(error.start, 'character')}"
        hint = "convert the file to UTF-8, or skip such documents with `--on-error skip`"
        raise BadDocument("not UTF-8", detail, hint) from None
    return text
