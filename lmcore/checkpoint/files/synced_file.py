"""Files that are checksummed while they are written, and on the disk when they are closed."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcore.checkpoint.files.block_writer import BLOCK_BYTES, BlockWriter, new_block
from lmcore.checkpoint.manifest import FileEntry
from lmcore.crc32 import crc32
from lmcore.idle_work import background_writer

__all__ = [
    "SyncedFile",
    "file_checksum",
    "num_io_threads",
    "write_durably",
]

# Small enough that a piece is still in the processor's cache for its checksum, after the copy.
_PIECE_BYTES = 1024 * 1024


class SyncedFile:
    """A new binary file that is checksummed while it is written, and synced when it is closed.

    A second thread writes full blocks, so that `close` waits for the last ones only; in a save
    while training continues it is a thread that uses idle processors.  A failure is kept in `error`
    and raised by `check` and `close`, never by `write`: torch's serializer would hide it behind
    another error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.error: OSError | None = None
        self._checksum = 0
        self._file = path.open("xb", buffering=0)
        self._background = background_writer(self._file.fileno())
        self._block = memoryview(b"") if self._background else new_block()
        self._filled = 0
        self._writer: BlockWriter | None = None

    def write(self, content: bytes | bytearray | memoryview) -> int:
        """Append *content*; return its length even after a failure (see the class)."""
        view = memoryview(content).cast("B")
        try:
            self._append(view)
        except OSError as error:
            self.error = error
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self.size

    def flush(self) -> None:
        """Do nothing: `close` flushes."""

    def check(self) -> None:
        """Raise the failure of an earlier write, if there was one."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Flush, sync and close."""
        try:
            self.check()
            self._stop_writing()
            self.check()
            rest = self._block[: self._filled]
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
            os.fsync(self._file.fileno())
        except OSError:
            self._abandon()
            raise
        self._file.close()

    def entry(self) -> FileEntry:
        """Return the size and checksum for the manifest."""
        return FileEntry(size=self.size, crc32=self._checksum)

    def _append(self, view: memoryview) -> None:
        if self._background is not None:
            self._background.append(view)
            self._check_background()
            return
        start = 0
        while start < len(view) and self.error is None:
            length = min(_PIECE_BYTES, BLOCK_BYTES - self._filled, len(view) - start)
            self._write_piece(view[start : start + length])
            start += length

    def _write_piece(self, piece: memoryview) -> None:
        """Copy a piece to the block, which has room for it."""
        end = self._filled + len(piece)
        _copy(piece, self._block[self._filled : end])
        self._checksum = crc32(piece, self._checksum)
        self._filled = end
        if end == BLOCK_BYTES:
            if self._writer is None:
                self._writer = BlockWriter(self._file.fileno())
            self._block, self._filled = self._writer.exchange(self._block), 0
            self.error = self._writer.error

    def _check_background(self) -> None:
        if self._background is not None:
            self._checksum, number = self._background.checksum, self._background.error
            if number and self.error is None:
                self.error = OSError(number, os.strerror(number))

    def _stop_writing(self) -> None:
        if self._background is not None:
            self._background.finish()
            self._check_background()
            self._background = None
        if self._writer is not None:
            self._writer.stop()
            self.error = self.error or self._writer.error
            self._writer = None

    def _abandon(self) -> None:
        self._stop_writing()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()


def _copy(piece: memoryview, target: memoryview) -> None:
    """Copy bytes; other threads run meanwhile, unlike in an assignment of slices."""
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(piece, np.uint8))


def num_io_threads(at_most: int) -> int:
    """Return the number of threads for files: the cores of this process, at most *at_most*."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(at_most, cores)


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of the file *path*; other threads run meanwhile."""
    checksum = 0
    piece = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as stream:
        while length := stream.readinto(piece):
            checksum = crc32(piece[:length], checksum)
    return checksum


def write_durably(path: Path, content: bytes) -> FileEntry:
    """Write the new file *path* and sync it."""
    with SyncedFile(path) as stream:
        stream.write(content)
    return stream.entry()
