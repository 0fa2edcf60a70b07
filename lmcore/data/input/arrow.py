"""Arrow's files and streams, Feather among them: a row a document; needs `pyarrow`.

The `datasets` package writes streams into its `.arrow` files; which one it is stands in the first
bytes.  Files on a disk are mapped, so that a record batch may be larger than memory.
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
        DamagedError: It cannot be read to its end; all whole record batches before came.
        DataError: It cannot be read at all.
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
            f"`{path}` has the first version of Feather",
            why="only the second, which is Arrow's file format, can be read",
            hint="write it anew: `pyarrow.feather.write_feather(read_feather(OLD), NEW)`",
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
    """Yield the record batches, and read what follows: an archive's checksum stands there."""
    yield from stream
    while unpacked.stream.read(_PIECE_BYTES):
        pass


def _require_end(path: str, mapped: pa.MemoryMappedFile) -> None:
    mapped.seek(max(0, mapped.size() - len(_FILE)))
    if mapped.read() != _FILE:
        raise CutShortError(
            f"`{path}` is cut short",
            why="the description at its end is missing",
            hint="copy or download it again",
        )


class _Whole:
    """The record batches of a file, and how far they were read."""

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
    """Raise where offsets point outside of the data: unlike Parquet's they are the file's own.

    Texts are checked as bytes, so that one that is not UTF-8 is one row's problem.
    """
    import pyarrow as pa

    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.view(pa.large_binary())
    column.validate(full=True)
