"""Reader of Arrow files and streams, including Feather: one document per row; needs `pyarrow`.

The `datasets` package writes streams into its `.arrow` files; the first bytes distinguish them from
files.  Files on disk are memory-mapped, so that a record batch may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.data.input.arrow_columns import (
    arrow_errors,
    documents_of,
    require_columns,
    require_package,
)
from lmcore.data.input.batch import TextBatch
from lmcore.data.input.compression import STDIN, CutShortError, DamagedError, Opened, open_input
from lmcore.data.input.document import InputDocument, batch_documents, unusable_file
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import BadDocument

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["read"]

_PIECE_BYTES = 1 << 20
_FILE, _FEATHER_1, _STREAM = b"ARROW1", b"FEA1", b"\xff\xff\xff\xff"


def read(file: InputFile, options: InputOptions) -> Generator[TextBatch, None, None]:
    """Yield the rows of *file*.

    Raises:
        MissingPackageError: `pyarrow` is not installed.
        DamagedError: it cannot be read to its end; all complete record batches were yielded.
        DataError: it cannot be read at all.
    """
    require_package("an Arrow file")
    with arrow_errors(file.path), ExitStack() as stack:
        schema, batches, position = _open(file.path, stack)
        try:
            require_columns(schema, options)
        except BadDocument as bad:
            yield unusable_file(file, options, bad)
            return
        documents = _documents(batches, options)
        yield from batch_documents(file, options, "row", documents, position)


_Parts = tuple["pa.Schema", "Iterator[pa.RecordBatch]", Callable[[], int]]


def _open(path: str, stack: ExitStack) -> _Parts:
    import pyarrow as pa

    start = b""
    if path != STDIN and Path(path).is_file():
        with Path(path).open("rb") as raw:
            start = raw.read(len(_FILE))
    if start.startswith(_FEATHER_1):
        raise DamagedError(
            f"`{path}` has version 1 of Feather",
            why="only version 2, Arrow's file format, is supported",
            hint="convert it: `pyarrow.feather.write_feather(read_feather(OLD), NEW)`",
        )
    if start.startswith(_FILE):
        mapped = stack.enter_context(pa.memory_map(path))
        _require_end(path, mapped)
        opened = stack.enter_context(pa.ipc.open_file(mapped))
        whole = _Whole(opened, mapped.size())
        return opened.schema, whole.batches(), whole.position
    if start.startswith(_STREAM):
        mapped = stack.enter_context(pa.memory_map(path))
        stream = stack.enter_context(pa.ipc.open_stream(mapped))
        return stream.schema, iter(stream), mapped.tell
    unpacked = stack.enter_context(open_input(path))
    stream = stack.enter_context(pa.ipc.open_stream(unpacked.stream))
    return stream.schema, _to_the_end(stream, unpacked), unpacked.position


def _to_the_end(stream: pa.RecordBatchReader, unpacked: Opened) -> Iterator[pa.RecordBatch]:
    """Yield the record batches, and read on to the end, to verify an archive's checksum."""
    yield from stream
    while unpacked.stream.read(_PIECE_BYTES):
        pass


def _require_end(path: str, mapped: pa.MemoryMappedFile) -> None:
    mapped.seek(max(0, mapped.size() - len(_FILE)))
    if mapped.read() != _FILE:
        raise CutShortError(
            f"`{path}` is cut short",
            why="the footer is missing",
            hint="copy or download it again",
        )


class _Whole:
    """Record batches of a file, and the position in it."""

    def __init__(self, opened: pa.RecordBatchFileReader, size: int) -> None:
        self._opened, self._size, self._done = opened, size, 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        for index in range(self._opened.num_record_batches):
            yield self._opened.get_batch(index)
            self._done = index + 1

    def position(self) -> int:
        num_batches: int = self._opened.num_record_batches
        return self._size * self._done // max(1, num_batches)


def _documents(batches: Iterator[pa.RecordBatch], options: InputOptions) -> Iterator[InputDocument]:
    number = 1
    for batch in batches:
        wanted = batch.select(list(dict.fromkeys(options.keys)))
        for column in wanted.columns:
            _validate(column)
        yield from documents_of(wanted, number, options)
        number += batch.num_rows


def _validate(column: pa.Array) -> None:
    """Raise if offsets point outside the data; unlike Parquet's, they come from the file.

    Texts are checked as bytes, so that invalid UTF-8 is a problem of one row.
    """
    import pyarrow as pa

    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.view(pa.large_binary())
    column.validate(full=True)
