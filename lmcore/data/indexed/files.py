"""Both files of an indexed dataset, written so that they appear complete or not at all.

They have hidden names until their content is on the disk.  The `.idx` is renamed last: if it
exists, the pair is complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lmcore.base.durable import AtomicFile, publish_file
from lmcore.base.errors import DataError
from lmcore.data.indexed.idx_reader import Format
from lmcore.data.indexed.idx_writer import IndexContent, write_index

__all__ = [
    "DiskFullError",
    "IndexedFiles",
    "check_token_range",
    "commit_pair",
    "copies_among",
    "disk_errors",
    "file_changed",
    "replacing",
]

_BUFFER = 1 << 20
_PLACES, _PLACE_BYTES = 16, 1 << 16
"""Places of a `.bin` that are compared, and bytes of each."""


class DiskFullError(DataError):
    """Full disk, or exceeded disk quota or file size limit."""


def copies_among(prefixes: Iterable[str]) -> tuple[str, str] | None:
    """Return two of the datasets that have the same content; None if all differ.

    Of datasets with equal `.idx` files, which are read only if they have the same size, the `.bin`
    files are compared at evenly spaced places; without them, as on a host that has the indices
    alone, the names, in which `-` and `_` count as equal.

    Args:
        prefixes: Paths of the datasets without ending; each has an `.idx`.
    """
    by_size: dict[int, list[str]] = {}
    for prefix in prefixes:
        by_size.setdefault(Path(f"{prefix}.idx").stat().st_size, []).append(prefix)
    for alike in by_size.values():
        found: dict[tuple[bytes, bytes], str] = {}
        for prefix in alike if len(alike) > 1 else ():
            with Path(f"{prefix}.idx").open("rb") as file:
                index = hashlib.file_digest(file, "blake2b").digest()
            earlier = found.setdefault((index, _places(prefix)), prefix)
            if earlier != prefix:
                return earlier, prefix
    return None


def _places(prefix: str) -> bytes:
    """Return a digest of evenly spaced places of a `.bin`; without one, the name of the dataset."""
    try:
        with Path(f"{prefix}.bin").open("rb") as file:
            digest, size = hashlib.blake2b(), os.fstat(file.fileno()).st_size
            for place in range(_PLACES):
                file.seek(max(size - _PLACE_BYTES, 0) * place // (_PLACES - 1))
                digest.update(file.read(_PLACE_BYTES))
    except FileNotFoundError:
        return Path(prefix).name.replace("_", "-").encode()
    return digest.digest()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `DataError` that names *path*.

    Raises:
        DiskFullError: The disk is full, or a quota or file size limit is exceeded.
        DataError: Another `OSError` occurred.
    """
    try:
        yield
    except OSError as error:
        what, why = f"cannot write `{path}`", error.strerror or str(error)
        if isinstance(error, FileExistsError):  # of `mkdir(exist_ok=True)`
            why = f"`{error.filename}` is a file, not a directory"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "make room on the disk and start again; no incomplete file is left"
            raise DiskFullError(what, why=why, hint=hint) from error
        hint = "check the directory and its permissions"
        raise DataError(what, why=why, hint=hint) from error


def file_changed(path: str | Path) -> DataError:
    """Return the error for a file that changed while it was read."""
    return DataError(
        f"`{path}` changed while it was read",
        hint="wait until the other process has written it, and start again",
    )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces *path*, durably, unless the block fails.

    Raises:
        DataError: The file cannot be written; an older file of that name stays.
    """
    with disk_errors(path), AtomicFile(path) as file:
        yield file


def commit_pair(made: tuple[Path, Path], bin_path: Path, idx_path: Path) -> None:
    """Give a finished `.bin` and `.idx` their names.

    An older `.idx` is removed first, so that it is never beside the new `.bin`.

    Args:
        made: Temporary paths of `.bin` and `.idx`, synced to the disk.
        bin_path: Final path of the `.bin`.
        idx_path: Final path of the `.idx`.

    Raises:
        DataError: A file cannot be renamed.
    """
    with disk_errors(idx_path):
        idx_path.unlink(missing_ok=True)
        for temporary, path in zip(made, (bin_path, idx_path), strict=True):
            publish_file(temporary, path)


def check_token_range(
    tokens: npt.NDArray[np.integer], dtype: npt.DTypeLike, bin_path: Path
) -> None:
    """Raise `DataError` for a token that is negative or too large for its type."""
    highest = np.iinfo(np.dtype(dtype)).max
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    if low < 0 or high > highest:
        raise DataError(
            f"`{bin_path}`: token {low if low < 0 else high} does not fit {dtype}",
            why=f"the type holds 0 to {highest}",
            hint="the tokenizer returns ids outside its own vocabulary",
        )


class IndexedFiles:
    """Files `PREFIX.bin` and `PREFIX.idx` under temporary names, until `commit`.

    Args:
        prefix: Path of the files without ending; its directory is created if missing.

    Attributes:
        bin: The open `.bin`; wrap writes to it in `disk_errors`.

    Raises:
        DataError: The directory is not writable.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.idx_path, self.bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        self._idx_file: AtomicFile | None = None
        with disk_errors(self.bin_path):
            self.bin_path.parent.mkdir(parents=True, exist_ok=True)
            self._bin_file = AtomicFile(self.bin_path, buffering=_BUFFER)
        self.bin = self._bin_file.stream

    def finish(self, content: IndexContent, dtype: npt.DTypeLike, format_: Format) -> None:
        """Write the index and sync both temporary files to the disk.

        Args:
            content: Content of the index.
            dtype: Type of a stored token.
            format_: Format of the index.

        Raises:
            DataError: A file cannot be written.
        """
        with disk_errors(self.bin_path):
            self._bin_file.finish()
        with disk_errors(self.idx_path):
            self._idx_file = AtomicFile(self.idx_path)
            write_index(self._idx_file.stream, content, dtype, format_)
            self._idx_file.finish()

    def commit(self) -> None:
        """Give the finished files their names."""
        commit_pair(self.finished_paths, self.bin_path, self.idx_path)

    @property
    def finished_paths(self) -> tuple[Path, Path]:
        """Temporary paths of `.bin` and `.idx` between `finish` and `commit`."""
        if self._idx_file is None:
            raise RuntimeError("`finish` comes before")
        return self._bin_file.temporary, self._idx_file.temporary

    def close(self) -> None:
        """Remove the files unless they were committed; may be called again."""
        for file in (self._bin_file, self._idx_file):
            if file is not None:
                file.close()
