"""Writer of an `.idx` in either of Megatron's formats, from arrays that come in pieces.

The sizes of a corpus's sequences may not fit in memory, so the content is iterated over in pieces,
once for each array of the file.  `RebuiltIndex` is the content from the tokens alone, if an
end-of-document token ends each document.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError, counted
from lmcore.data.indexed.idx_reader import (
    CACHED_HEADER,
    CACHED_MAGIC,
    HEADER,
    MAGIC,
    TOKEN_DTYPES,
    VERSION,
    Format,
)

__all__ = ["IndexContent", "NumberSpool", "RebuiltIndex", "dtype_code", "write_index"]

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


_PIECE_TOKENS = 1 << 22
_LARGEST_SIZE = int(np.iinfo(np.int32).max)


class RebuiltIndex:
    """Content of an index with one sequence per document, each up to an end-of-document token.

    Args:
        bin_path: File of the tokens.
        dtype: Type of a stored token.
        eod: Id of the end-of-document token.
        directory: Directory of a temporary file.

    Attributes:
        unended: Number of tokens after the last end-of-document token; they are a document, too.

    Raises:
        DataError: The size of the file is not a multiple of the token's, or *eod* does not occur.
    """

    multimodal = False

    def __init__(
        self, bin_path: Path, dtype: np.dtype[np.integer], eod: int, directory: Path
    ) -> None:
        self._sizes = NumberSpool(directory, "i")
        self.unended = 0
        self._read(bin_path, dtype, eod)
        self.sequences = self.documents = len(self._sizes)

    def close(self) -> None:
        """Remove the temporary file; may be called again."""
        self._sizes.close()

    def sizes(self) -> Iterator[Integers]:
        """Yield the number of tokens of each sequence, in pieces."""
        return self._sizes.chunks()

    def document_ends(self) -> Iterator[Integers]:
        """Yield the last sequence + 1 of each document, in pieces."""
        for at in range(0, self.documents, _PIECE_TOKENS):
            yield np.arange(at, min(at + _PIECE_TOKENS, self.documents)) + 1

    def modes(self) -> Iterator[Integers]:
        """Return an empty iterator."""
        return iter(())

    def _read(self, bin_path: Path, dtype: np.dtype[np.integer], eod: int) -> None:
        size = bin_path.stat().st_size
        if size % dtype.itemsize:
            raise DataError(
                f"`{bin_path}` does not hold whole tokens of {dtype}",
                why=f"it has {counted(size, 'byte')}, a token has {dtype.itemsize}",
                hint="the file is cut short, or has another token type; give it with `--dtype`",
            )
        start = at = 0
        with bin_path.open("rb") as file:
            while (tokens := np.fromfile(file, dtype=dtype, count=_PIECE_TOKENS)).size:
                ends = np.flatnonzero(tokens == eod) + at + 1
                if ends.size:
                    self._add(np.diff(ends, prepend=start), bin_path)
                    start = int(ends[-1])
                at += tokens.size
        if not len(self._sizes):
            self.close()
            raise DataError(
                f"token {eod} does not occur in `{bin_path}`",
                why=f"the file has {counted(at, 'token')} of {dtype}",
                hint="check `--eod` and `--dtype`; without end-of-document tokens an index cannot "
                "be rebuilt",
            )
        self.unended = at - start
        if self.unended:
            self._add(np.array([self.unended]), bin_path)

    def _add(self, sizes: Integers, bin_path: Path) -> None:
        if int(sizes.max()) > _LARGEST_SIZE:
            self.close()
            raise DataError(
                f"`{bin_path}`: a document of {sizes.max()} tokens",
                why=f"the format allows at most {_LARGEST_SIZE}",
                hint="check `--eod` and `--dtype`",
            )
        self._sizes.extend(sizes)
