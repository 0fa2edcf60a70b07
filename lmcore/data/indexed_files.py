"""The two files of an indexed dataset while they are written: complete, or not there at all.

The bytes go to temporary names beside the target and are renamed once they are on the disk, the
`.idx` last: where it stands, the pair is complete.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy.typing as npt

from lmcore.data.index_file import Format
from lmcore.data.index_writing import IndexContent, write_index
from lmcore.errors import DataError

__all__ = ["IndexedFiles", "disk_errors", "replace_file"]

_BUFFER = 1 << 20


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
        ending = f".{os.getpid()}.tmp"
        self._temporaries = (Path(f"{self.bin_path}{ending}"), Path(f"{self.idx_path}{ending}"))
        self._finished = False
        with disk_errors(self.bin_path):
            self.bin_path.parent.mkdir(parents=True, exist_ok=True)
            self.bin: BinaryIO = self._temporaries[0].open("wb", buffering=_BUFFER)

    def finish(self, content: IndexContent, dtype: npt.DTypeLike, format_: Format) -> None:
        """Write the index and bring both temporary files to the disk."""
        with disk_errors(self.bin_path):
            self.bin.flush()
            os.fsync(self.bin.fileno())
            self.bin.close()
        with disk_errors(self.idx_path), self._temporaries[1].open("wb") as file:
            write_index(file, content, dtype, format_)
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
            self.bin.close()
        for path in self._temporaries:
            path.unlink(missing_ok=True)
