"""Reader of Parquet: one document per row, from the requested columns only; needs `pyarrow`."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import DataError
from lmcore.data.input.arrow_columns import (
    arrow_errors,
    documents_of,
    require_columns,
    require_package,
)
from lmcore.data.input.batch import TextBatch
from lmcore.data.input.compression import STDIN, CutShortError, DamagedError
from lmcore.data.input.document import InputDocument, batch_documents, unusable_file
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import BadDocument

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = ["read"]

_MAGIC = b"PAR1"
_MAX_ROWS, _MAX_BYTES = 32, 1 << 23  # decoded at a time
_BUFFER_BYTES = 1 << 20


def read(file: InputFile, options: InputOptions) -> Generator[TextBatch, None, None]:
    """Yield the rows of *file*, a few at a time for any size of its row groups.

    Raises:
        MissingPackageError: `pyarrow` is not installed.
        DamagedError: it cannot be read to its end; all rows before the damage were yielded.
        DataError: it cannot be read at all.
    """
    require_package("a Parquet file")
    import pyarrow.parquet as pq

    size = _require_whole(file.path)
    with (
        arrow_errors(file.path),
        pq.ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as opened,
    ):
        try:
            require_columns(opened.schema_arrow, options)
        except BadDocument as bad:
            yield unusable_file(file, options, bad)
            return
        rows = _Rows(opened, options, size)
        yield from batch_documents(file, options, "row", rows.documents(), rows.position)


def _require_whole(path: str) -> int:
    """Return the size of a file, in bytes; raise unless it begins and ends like Parquet."""
    if path == STDIN or not Path(path).is_file():
        raise DataError(
            f"Parquet cannot be read from a pipe: `{path}`",
            why="its schema is at its end",
            hint="write it to a file first",
        )
    try:
        with Path(path).open("rb") as file:
            start = file.read(len(_MAGIC))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(_MAGIC)))
            end = file.read()
    except OSError as error:
        raise DataError(f"cannot read `{path}`", why=error.strerror or str(error)) from error
    if start != _MAGIC:
        raise DamagedError(
            f"`{path}` is not a Parquet file",
            why=f"it begins with {start!r}",
            hint="give its format with `--input-format`; decompress a compressed file first",
        )
    if end != _MAGIC or size < 12:
        raise CutShortError(
            f"`{path}` is cut short",
            why="the footer is missing",
            hint="copy or download it again",
        )
    return size


class _Rows:
    """Rows of a file, and the position in it."""

    def __init__(self, opened: pq.ParquetFile, options: InputOptions, size: int) -> None:
        self._opened, self._options, self._size = opened, options, size
        self._done = 0

    def documents(self) -> Iterator[InputDocument]:
        columns = list(dict.fromkeys(self._options.keys))
        batches = self._opened.iter_batches(
            self._rows_at_a_time(), columns=columns, use_threads=False
        )
        for batch in batches:
            yield from documents_of(batch, self._done + 1, self._options)
            self._done += batch.num_rows

    def position(self) -> int:
        num_rows: int = self._opened.metadata.num_rows
        return self._size * self._done // max(1, num_rows)

    def _rows_at_a_time(self) -> int:
        """Return a number of rows per batch that needs little memory even for long texts."""
        metadata = self._opened.metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        largest = max(
            (group.total_byte_size // group.num_rows for group in groups if group.num_rows),
            default=0,
        )
        return min(_MAX_ROWS, max(1, _MAX_BYTES // max(1, largest)))
