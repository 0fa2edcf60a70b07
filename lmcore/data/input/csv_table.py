"""Reader of csv and tsv tables: one document per row."""

from __future__ import annotations

import csv
import sys
from collections.abc import Generator, Iterator
from typing import BinaryIO

from lmcore.data.input.batch import TextBatch
from lmcore.data.input.compression import BOM, open_input
from lmcore.data.input.document import (
    InputDocument,
    batch_documents,
    key_missing,
    require_utf8,
    unusable_file,
)
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import BadDocument, too_long

__all__ = ["read"]

_OTHERS = {"\t": "tab", ";": "';'", "|": "'|'", ",": ","}
_DELIMITERS = {"csv": ",", "tsv": "\t"}


def read(file: InputFile, options: InputOptions) -> Generator[TextBatch, None, None]:
    """Yield the rows of *file*; a row that does not match the header is a problem.

    Raises:
        DamagedError: it cannot be read to its end; all complete rows before were yielded.
        DataError: it cannot be read at all.
    """
    with open_input(file.path) as opened:
        rows = _rows(file, opened.stream, options)
        columns: _Columns | None = None
        try:
            columns = _columns(rows, options)
        except BadDocument as bad:
            yield unusable_file(file, options, bad)
        if columns is not None:
            documents = _documents(rows, columns)
            yield from batch_documents(file, options, "line", documents, opened.position)


class _Columns:
    """Indices of the requested columns.

    Attributes:
        count: number of fields of a row.
        places: index of each requested column, from 0.
        first: the first row, if it is not a header.
    """

    def __init__(self, count: int, places: tuple[int, ...], first: _Row | None) -> None:
        self.count, self.places, self.first = count, places, first


class _Row:
    """Fields of a row or its problem, its first line and its size."""

    __slots__ = ("fields", "line", "size")

    def __init__(self, line: int, size: int, fields: list[str] | BadDocument) -> None:
        self.line, self.size, self.fields = line, size, fields


def _columns(rows: Iterator[_Row], options: InputOptions) -> _Columns | None:
    """Read the header, or number the columns; return None for an empty table."""
    first = next(rows, None)
    if first is None:
        return None
    if isinstance(first.fields, BadDocument):
        raise first.fields
    names = first.fields
    if not options.header:
        names = [str(number) for number in range(1, len(first.fields) + 1)]
    for key in options.keys:
        if key not in names:
            raise _missing(key, names, options)
        if names.count(key) > 1:
            raise BadDocument("key missing", f"{names.count(key)} columns have the name `{key}`")
    places = tuple(names.index(key) for key in options.keys)
    return _Columns(len(names), places, None if options.header else first)


def _missing(key: str, names: list[str], options: InputOptions) -> BadDocument:
    called = "its columns" if options.header else "without a header its columns"
    bad = key_missing(key, names, options.key_flag(key), called=called)
    others = [delimiter for delimiter in _OTHERS if delimiter in names[0]]
    if len(names) > 1 or not others:
        return bad
    hint = f"does it have another delimiter? try `--delim {_OTHERS[others[0]]}`"
    return BadDocument(bad.reason, bad.detail, hint)


def _documents(rows: Iterator[_Row], columns: _Columns) -> Iterator[InputDocument]:
    if columns.first is not None:
        yield _document(columns.first, columns)
    for row in rows:
        yield _document(row, columns)


def _document(row: _Row, columns: _Columns) -> InputDocument:
    return InputDocument(row.line, row.size, _texts(row.fields, columns))


def _texts(fields: list[str] | BadDocument, columns: _Columns) -> tuple[str, ...] | BadDocument:
    if isinstance(fields, BadDocument):
        return fields
    if len(fields) != columns.count:
        return BadDocument(
            "wrong number of fields",
            f"it has {len(fields)}, the first row has {columns.count}",
            "check `--delim` and `--quotes`, or skip such lines with `--on-error skip`",
        )
    try:
        return tuple(require_utf8(fields[place]) for place in columns.places)
    except BadDocument as bad:
        return bad


def _rows(file: InputFile, stream: BinaryIO, options: InputOptions) -> Iterator[_Row]:
    """Yield the rows that are not empty."""
    csv.field_size_limit(sys.maxsize)  # the package's own limit; ours is on whole rows
    lines = _Lines(stream, options)
    delimiter = options.delimiter or _DELIMITERS.get(file.format, ",")
    quotes = options.quotes if options.quotes is not None else file.format == "csv"
    while True:  # again after each row that was too long
        reader = csv.reader(
            lines,
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        )
        try:
            for fields in reader:
                line, size = lines.taken()
                if fields:
                    yield _Row(line, size, fields)
        except BadDocument as bad:
            yield _Row(*lines.taken(), bad)
        except csv.Error as error:
            yield _Row(*lines.taken(), BadDocument("wrong number of fields", str(error)))
        else:
            return


class _Lines:
    """Lines of a table as text; raises `BadDocument` for a row that is too long."""

    def __init__(self, stream: BinaryIO, options: InputOptions) -> None:
        self._stream, self._bound = stream, options.max_document_bytes
        self._skip = options.skip
        self._number = 0
        self._first, self._size = 1, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(self._bound + 2)
        if not line:
            if self._size:  # inside a row
                raise _unclosed()
            raise StopIteration
        self._number += 1
        if self._number == 1:
            line = line.removeprefix(BOM)
        self._size += len(line)
        if self._size > self._bound + (2 if line.endswith(b"\n") else 0):
            if self._skip:  # else the rest is not needed, and it may have no end
                self._to_line_end(line)
            raise self._too_long()
        return line.decode(errors="surrogateescape")

    def taken(self) -> tuple[int, int]:
        """Return the first line and the size of the row just read, and start the next one."""
        row = self._first, self._size
        self._first, self._size = self._number + 1, 0
        return row

    def _to_line_end(self, piece: bytes) -> None:
        while not piece.endswith(b"\n") and (piece := self._stream.readline(1 << 16)):
            self._size += len(piece)

    def _too_long(self) -> BadDocument:
        long = too_long(self._bound)
        if self._number == self._first:
            return long
        detail = f"{long.detail} and continues in line {self._number}: is a quote not closed?"
        hint = f"check `--quotes`, or {long.hint}"
        return BadDocument(long.reason, detail, hint)


def _unclosed() -> BadDocument:
    detail = "the table ends inside double quotes"
    return BadDocument("quote not closed", detail, "it may be truncated; or check `--quotes`")
