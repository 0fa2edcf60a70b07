"""Writer of an `.idx` in either of Megatron's formats, from arrays that come in pieces.

The sizes of a corpus's sequences may not fit in memory, so the content is iterated over in pieces,
once for each array of the file.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.idx_reader import (
    CACHED_HEADER,
    CACHED_MAGIC,
    HEADER,
    MAGIC,
    TOKEN_DTYPES,
    VERSION,
    Format,
)

__all__ = ["IndexContent", "NumberSpool", "dtype_code", "write_index"]

_CHUNK = 1 << 20

Integers = npt.NDArray[np.integer]


class IndexContent(Protocol):
    """Content of an index, in pieces that can be iterated over again."""

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        ...

    @property
    def documents(self) -> int:
        """Number of documents."""
        ...

    @property
    def multimodal(self) -> bool:
        """True if each sequence has a mode."""
        ...

    def sizes(self) -> Iterator[Integers]:
        """Yield the number of tokens of each sequence, in pieces."""
        ...

    def document_ends(self) -> Iterator[Integers]:
        """Yield the last sequence + 1 of each document, in pieces."""
        ...

    def modes(self) -> Iterator[Integers]:
        """Yield the mode of each sequence, in pieces; only called if `multimodal`."""
        ...


class NumberSpool:
    """Growing list of integers: the last ones in memory, all others in an unnamed file.

    Args:
        directory: Directory of the file, which is created when needed.
        code: Type code of the integers in `array.array`.
    """

    def __init__(self, directory: Path, code: str) -> None:
        self._recent: array[int] = array(code)
        self._directory = directory
        self._file: BinaryIO | None = None
        self._spooled = 0

    def __len__(self) -> int:
        """Return the number of integers."""
        return self._spooled + len(self._recent)

    def extend(self, values: Integers) -> None:
        """Append *values*."""
        self._recent.frombytes(values.astype(self._recent.typecode, copy=False).tobytes())
        self.flush()

    def append(self, value: int) -> None:
        """Append one integer."""
        self._recent.append(value)
        self.flush()

    def flush(self) -> None:
        """Move the integers in memory to the file if there are many."""
        if len(self._recent) < _CHUNK:
            return
        if self._file is None:
            from tempfile import TemporaryFile

            self._file = TemporaryFile(dir=self._directory)  # noqa: SIM115  # `close` closes it
        self._file.seek(0, os.SEEK_END)
        self._file.write(self._recent)
        self._spooled += len(self._recent)
        self._recent = array(self._recent.typecode)

    def chunks(self) -> Iterator[Integers]:
        """Yield all integers in pieces; do not append meanwhile."""
        code = self._recent.typecode
        if self._file is not None:
            self._file.flush()
            self._file.seek(0)
            while content := self._file.read(_CHUNK * self._recent.itemsize):
                yield np.frombuffer(content, dtype=code)
        if self._recent:
            yield np.frombuffer(self._recent.tobytes(), dtype=code)

    def close(self) -> None:
        """Remove the file; may be called again."""
        if self._file is not None:
            self._file.close()


def dtype_code(dtype: npt.DTypeLike) -> tuple[int, np.dtype[np.integer]]:
    """Return the format's code of a token type, and the stored type (little-endian).

    Raises:
        ValueError: The formats do not have the type.
    """
    for code, known in TOKEN_DTYPES.items():
        if np.dtype(dtype) == known:
            return code, known
    raise ValueError(f"{dtype} is not a token type of the format")


def write_index(
    file: BinaryIO, content: IndexContent, dtype: npt.DTypeLike, format_: Format
) -> None:
    """Write an index.

    Args:
        file: Empty binary file.
        content: Content of the index.
        dtype: Type of a stored token.
        format_: Format to write.

    Raises:
        ValueError: A multimodal index is to be written as `cached`, which has no modes.
        OSError: Writing failed.
    """
    code, stored = dtype_code(dtype)
    if format_ == "cached":
        if content.multimodal:
            raise ValueError("the `cached` format has no modes")
        _write_cached(file, content, code, stored.itemsize)
    else:
        _write_mmap(file, content, code, stored.itemsize)


def _write_mmap(file: BinaryIO, content: IndexContent, code: int, width: int) -> None:
    file.write(MAGIC + HEADER.pack(VERSION, code, content.sequences, content.documents + 1))
    _write(file, content.sizes(), "<i4")
    _write(file, _starts(content, width), "<i8")
    file.write(bytes(8))
    _write(file, content.document_ends(), "<i8")
    if content.multimodal:
        _write(file, content.modes(), "<i1")


def _write_cached(file: BinaryIO, content: IndexContent, code: int, width: int) -> None:
    count = content.sequences
    counts = (VERSION, code, width, count, count, content.documents + 1)
    file.write(CACHED_MAGIC + CACHED_HEADER.pack(*counts))
    dimensions = (np.arange(at, min(at + _CHUNK, count + 1)) for at in range(0, count + 1, _CHUNK))
    _write(file, dimensions, "<i8")
    _write(file, _starts(content, 1), "<i8")
    total = sum(int(sizes.sum(dtype=np.int64)) for sizes in content.sizes())
    file.write(total.to_bytes(8, "little"))
    _write(file, content.sizes(), "<i8")
    file.write(bytes(8))
    _write(file, content.document_ends(), "<i8")


def _write(file: BinaryIO, pieces: Iterator[Integers], dtype: str) -> None:
    file.writelines(np.ascontiguousarray(piece.astype(dtype, copy=False)).data for piece in pieces)


def _starts(content: IndexContent, unit: int) -> Iterator[Integers]:
    start = 0
    for sizes in content.sizes():
        ends = start + np.cumsum(sizes, dtype=np.int64)
        yield (ends - sizes) * unit
        start = int(ends[-1]) if ends.size else start
