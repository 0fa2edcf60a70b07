"""Writes indexed datasets: complete, or not at all.

The bytes go to temporary names beside the target and are renamed once they are on disk, the
`.idx` last: where it stands, the pair is complete.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed import HEADER, MAGIC, TOKEN_DTYPES, VERSION
from lmcore.errors import DataError

__all__ = ["IndexedDatasetWriter", "disk_errors", "replace_file"]

_CHUNK = 1 << 20


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `DataError` that names *path*."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise DataError(
            f"cannot write `{path}`",
            why=error.strerror or str(error),
            hint="make room on the disk and start again; no incomplete file is left"
            if full
            else "check the directory and its permissions",
        ) from error


def replace_file(temporary: Path, target: Path) -> None:
    """Rename a complete file to its final name, durably."""
    temporary.replace(target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class IndexedDatasetWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`; a context manager that commits on a clean exit.

    On an exception the temporary files go and older files of that name stay as they were.  For
    several datasets that must appear together call `finish` on all of them, then `commit`.

    Args:
        prefix: The files' path without ending; its directory is made where it is missing.
        dtype: Type of a stored token, as `token_dtype` gives it.

    Raises:
        DataError: The disk is full or not writable, or a token does not fit the type.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.code, self.dtype = _token_type(np.dtype(dtype))
        self.prefix = str(prefix)
        self.idx_path, self.bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        self._sizes = array("i")
        self._document_ends = array("q", [0])
        self.tokens = 0
        self._finished = False
        ending = f".{os.getpid()}.tmp"
        self._temporaries = (Path(f"{self.bin_path}{ending}"), Path(f"{self.idx_path}{ending}"))
        with disk_errors(self.bin_path):
            self.bin_path.parent.mkdir(parents=True, exist_ok=True)
            self._bin: BinaryIO = self._temporaries[0].open("wb", buffering=_CHUNK)

    @property
    def documents(self) -> int:
        """Number of documents added."""
        return len(self._document_ends) - 1

    @property
    def sequences(self) -> int:
        """Number of sequences added."""
        return len(self._sizes)

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish and commit, or remove what was written if the block raised."""
        if kind is None:
            try:
                self.finish()
                self.commit()
            finally:
                self.close()
        else:
            self.close()

    def add_document(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        lengths: Sequence[int] | npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Append one document of one sequence, or of several whose *lengths* sum to its tokens."""
        values = _as_array(tokens)
        sizes = np.asarray([values.size] if lengths is None else lengths, dtype=np.int64)
        self._append(values, sizes)
        self._document_ends.append(len(self._sizes))

    def add_documents(
        self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]
    ) -> None:
        """Append many documents of one sequence each, their tokens one after another."""
        first = len(self._sizes) + 1
        self._append(tokens, lengths.astype(np.int64))
        self._document_ends.extend(range(first, len(self._sizes) + 1))

    def finish(self) -> None:
        """Write the index and bring both temporary files to the disk."""
        with disk_errors(self.bin_path):
            self._bin.flush()
            os.fsync(self._bin.fileno())
            self._bin.close()
        with disk_errors(self.idx_path), self._temporaries[1].open("wb") as file:
            self._write_index(file)
            file.flush()
            os.fsync(file.fileno())
        self._finished = True

    def commit(self) -> None:
        """Give the finished files their names; an older index goes first, so that none misfits."""
        if not self._finished:
            raise RuntimeError("`finish` comes before `commit`")
        with disk_errors(self.idx_path):
            self.idx_path.unlink(missing_ok=True)
            replace_file(self._temporaries[0], self.bin_path)
            replace_file(self._temporaries[1], self.idx_path)

    def close(self) -> None:
        """Remove what is not committed; may be called again."""
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self._bin.close()
        for path in self._temporaries:
            path.unlink(missing_ok=True)

    def _append(self, values: npt.NDArray[np.integer], sizes: npt.NDArray[np.int64]) -> None:
        if values.ndim != 1 or int(sizes.sum()) != values.size or (sizes < 0).any():
            raise ValueError(f"{values.size} tokens do not make sequences of {sizes.sum()}")
        if values.size:
            self._check_range(values)
        self._sizes.frombytes(_in_int32(sizes, self.bin_path).tobytes())
        with disk_errors(self.bin_path):
            self._bin.write(np.ascontiguousarray(values.astype(self.dtype, copy=False)).data)
        self.tokens += values.size

    def _check_range(self, values: npt.NDArray[np.integer]) -> None:
        limits = np.iinfo(self.dtype)
        low, high = int(values.min()), int(values.max())
        if low < max(0, limits.min) or high > limits.max:
            raise DataError(
                f"`{self.bin_path}`: token {low if low < 0 else high} does not fit {self.dtype}",
                why=f"the type holds 0 to {limits.max}",
                hint="the tokenizer gives ids outside its own vocabulary",
            )

    def _write_index(self, file: BinaryIO) -> None:
        head = HEADER.pack(VERSION, self.code, self.sequences, len(self._document_ends))
        file.write(MAGIC + head)
        sizes = np.frombuffer(self._sizes, dtype=np.int32)
        file.write(sizes.astype("<i4", copy=False).data)
        start = 0
        for at in range(0, len(sizes), _CHUNK):
            chunk = sizes[at : at + _CHUNK].astype(np.int64)
            starts = (start + np.cumsum(chunk) - chunk) * self.dtype.itemsize
            file.write(starts.astype("<i8", copy=False).data)
            start += int(chunk.sum())
        file.write(np.frombuffer(self._document_ends, dtype=np.int64).astype("<i8").data)


def _token_type(dtype: np.dtype[np.generic]) -> tuple[int, np.dtype[np.integer]]:
    for code, known in TOKEN_DTYPES.items():
        if dtype == known:
            return code, known
    raise ValueError(f"{dtype} is no token type of the format")


def _as_array(tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    values = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens, dtype=np.int64)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"tokens are integers, not {values.dtype}")
    return values


def _in_int32(sizes: npt.NDArray[np.int64], path: Path) -> npt.NDArray[np.int32]:
    if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
        raise DataError(
            f"`{path}`: a sequence of {sizes.max()} tokens",
            why="the format counts up to 2147483647 tokens in a sequence",
            hint="cut the document into several",
        )
    return sizes.astype(np.int32)
