"""The two files of an indexed dataset while they are written: complete, or not there at all.

The bytes go to temporary names beside the target and are renamed once they are on the disk, the
`.idx` last: where it stands, the pair is complete.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.idx_reader import Format
from lmcore.data.indexed.idx_writer import IndexContent, write_index
from lmcore.durable import AtomicFile, publish_file
from lmcore.errors import DataError

__all__ = [
    "DiskFullError",
    "IndexedFiles",
    "check_token_range",
    "commit_pair",
    "disk_errors",
    "file_changed",
    "replacing",
]

_BUFFER = 1 << 20


class DiskFullError(DataError):
    """There is no room for what is to be written."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `DataError` that names *path*.

    Raises:
        DiskFullError: The disk, or the user's share of it, is full.
    """
    try:
        yield
    except OSError as error:
        what, why = f"cannot write `{path}`", error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "make room on the disk and start again; no incomplete file is left"
            raise DiskFullError(what, why=why, hint=hint) from error
        hint = "check the directory and its permissions"
        raise DataError(what, why=why, hint=hint) from error


def file_changed(path: str | Path) -> DataError:
    """Return the error of a file that is not what it was when its reading began."""
    return DataError(
        f"`{path}` changed while it was read", hint="wait until it is written, and start again"
    )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets the name *path*, durably, where the block ends well.

    Raises:
        DataError: The disk refuses; an older file of that name stays.
    """
    with disk_errors(path), AtomicFile(path) as file:
        yield file


def commit_pair(made: tuple[Path, Path], bin_path: Path, idx_path: Path) -> None:
    """Name a finished `.bin` and `.idx`; an older index goes first, so that none misfits."""
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
            hint="the tokenizer gives ids outside its own vocabulary",
        )


class IndexedFiles:
    """`PREFIX.bin` and `PREFIX.idx` under temporary names, until `commit`.

    Args:
        prefix: The files' path without ending; its directory is made where it is missing.

    Attributes:
        bin: The open `.bin`; whatever is written to it goes through `disk_errors`.

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
        """Write the index and bring both temporary files to the disk."""
        with disk_errors(self.bin_path):
            self._bin_file.finish()
        with disk_errors(self.idx_path):
            self._idx_file = AtomicFile(self.idx_path)
            write_index(self._idx_file.stream, content, dtype, format_)
            self._idx_file.finish()

    def commit(self) -> None:
        """Give the finished files their names."""
        if self._idx_file is None:
            raise RuntimeError("`finish` comes before `commit`")
        commit_pair(
            (self._bin_file.temporary, self._idx_file.temporary), self.bin_path, self.idx_path
        )

    def close(self) -> None:
        """Remove what is not committed; may be called again."""
        for file in (self._bin_file, self._idx_file):
            if file is not None:
                file.close()
