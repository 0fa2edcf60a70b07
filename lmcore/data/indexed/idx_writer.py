"""Writes an `.idx` in either of Megatron's formats from numbers that come in pieces.

The sizes of a corpus's sequences may be more than fits in memory, so what is written is asked for
chunk by chunk, several times: each array of the file is a pass over it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
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
    """What an index says, in pieces that can be asked for again."""

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
        """Whether each sequence has a mode."""
        ...

    def sizes(self) -> Iterator[Integers]:
        """Yield the tokens of each sequence, in order."""
        ...

    def document_ends(self) -> Iterator[Integers]:
        """Yield for each document the number of sequences in it and before it."""
        ...

    def modes(self) -> Iterator[Integers]:
        """Yield the mode of each sequence; not called unless `multimodal`."""
        ...


class NumberSpool:
    """Integers appended one after another: the last in memory, those before in an unnamed file.

    Args:
        directory: Where the file goes, once there is need for one.
        code: Type of a number, as `array.array` names it.
    """

    def __init__(self, directory: Path, code: str) -> None:
        self._recent: array[int] = array(code)
        self._directory = directory
        self._file: BinaryIO | None = None
        self._spooled = 0

    def __len__(self) -> int:
        """Return how many numbers there are."""
        return self._spooled + len(self._recent)

    def extend(self, values: Integers) -> None:
        """Append *values*."""
        self._recent.frombytes(values.astype(self._recent.typecode, copy=False).tobytes())
        self.flush()

    def append(self, value: int) -> None:
        """Append one number."""
        self._recent.append(value)
        self.flush()

    def flush(self) -> None:
        """Move what is in memory to the file, where it is much."""
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
        """Yield all numbers in pieces; nothing may be appended meanwhile."""
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
    """Return the number that stands for a token's type, and the type as it is stored.

    Raises:
        ValueError: The formats have no such type.
    """
    for code, known in TOKEN_DTYPES.items():
        if np.dtype(dtype) == known:
            return code, known
    raise ValueError(f"{dtype} is no token type of the format")


def write_index(
    file: BinaryIO, content: IndexContent, dtype: npt.DTypeLike, format_: Format
) -> None:
    """Write an index.

    Args:
        file: Where it goes, from its start.
        content: What it says.
        dtype: Type of a stored token.
        format_: Which of the formats.

    Raises:
        ValueError: A multimodal index is wanted as `cached`, which has no place for modes.
        OSError: The disk refuses.
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
    _write(file, content.sizes, "<i4")
    _write(file, lambda: _starts(content, width), "<i8")
    file.write(bytes(8))
    _write(file, content.document_ends, "<i8")
    if content.multimodal:
        _write(file, content.modes, "<i1")


def _write_cached(file: BinaryIO, content: IndexContent, code: int, width: int) -> None:
    count = content.sequences
    counts = (VERSION, code, width, count, count, content.documents + 1)
    file.write(CACHED_MAGIC + CACHED_HEADER.pack(*counts))
    _write(file, lambda: _ascending(count + 1), "<i8")
    _write(file, lambda: _starts(content, 1), "<i8")
    total = sum(int(sizes.sum(dtype=np.int64)) for sizes in content.sizes())
    file.write(total.to_bytes(8, "little"))
    _write(file, content.sizes, "<i8")
    file.write(bytes(8))
    _write(file, content.document_ends, "<i8")


def _write(file: BinaryIO, chunks: Callable[[], Iterator[Integers]], dtype: str) -> None:
    file.writelines(
        np.ascontiguousarray(chunk.astype(dtype, copy=False)).data for chunk in chunks()
    )


def _starts(content: IndexContent, unit: int) -> Iterator[Integers]:
    start = 0
    for sizes in content.sizes():
        ends = start + np.cumsum(sizes, dtype=np.int64)
        yield (ends - sizes) * unit
        start = int(ends[-1]) if ends.size else start


def _ascending(count: int) -> Iterator[Integers]:
    for at in range(0, count, _CHUNK):
        yield np.arange(at, min(at + _CHUNK, count), dtype=np.int64)
