"""Files that are checksummed while they are written, and on the disk when they are closed.

A thread writes their blocks to the disk, past the system's page cache.  Through the cache every
byte is copied into new pages, which the system must find, fill and send to the disk later: of 1 GB
that took 0.3 to 1.6 s of processor time on the same machine, and 0.04 s directly (O_DIRECT), at
about twice the speed.  It also keeps the cache for the training data.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcore.base.crc32 import crc32
from lmcore.base.idle_work import background_writer
from lmcore.base.threads import start_optional
from lmcore.checkpoint.manifest import FileEntry

__all__ = [
    "BLOCK_BYTES",
    "WRITER_NAME",
    "SyncedFile",
    "file_checksum",
    "new_block",
    "num_io_threads",
    "write_durably",
]

# Small enough that a piece is still in the processor's cache for its checksum, after the copy.
_PIECE_BYTES = 1024 * 1024
WRITER_NAME = "lmcore-checkpoint-blocks"
BLOCK_BYTES = 4 * 1024 * 1024
"""Size of a block, a multiple of the alignment that any disk asks for."""
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_SYNC_BYTES = 16 * 1024 * 1024
"""Bytes through the page cache after which the file is synced: large enough that a sync is worth
its call, small enough that the disk is never idle for long."""


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
        self._writer: _BlockWriter | None = None

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
                self._writer = _BlockWriter(self._file.fileno())
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


def new_block() -> memoryview:
    """Return memory for a block, aligned as a direct write needs it, of huge pages if they exist.

    Of small pages, which are anywhere in memory, a disk takes a block in several requests, and the
    end of each interrupts the thread on a processor, which may be a thread of a training step.
    """
    if sys.platform != "linux":
        return memoryview(mmap.mmap(-1, BLOCK_BYTES))
    import numpy as np

    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, BLOCK_BYTES + _HUGE_PAGE_BYTES, flags=private)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, BLOCK_BYTES)
    return memoryview(memory)[start : start + BLOCK_BYTES]


class _BlockWriter:
    """Writes whole blocks in a thread, while the caller fills the next one.

    Blocks are written directly where the file system can, else through the page cache and synced
    meanwhile.  A failure is kept in `error`; blocks after it are dropped.
    """

    def __init__(self, descriptor: int) -> None:
        """Start the thread; without one, blocks are written by the caller.

        Args:
            descriptor: File, open for writing; nothing else writes to it before `stop`.
        """
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._direct = _set_direct(descriptor, direct=True)
        self._unsynced = 0
        self._full: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._free.put(new_block())
        self._thread = threading.Thread(target=self._run, name=WRITER_NAME, daemon=True)
        self._started = start_optional(self._thread)

    def exchange(self, block: memoryview) -> memoryview:
        """Take a full block to write, and return a free one."""
        if self._started:
            self._full.put(block)
        else:
            self._write(block)
            self._free.put(block)
        return self._free.get()

    def stop(self) -> None:
        """Return when all blocks are written; the file takes any number of bytes from then on."""
        if self._started:
            self._full.put(None)
            self._thread.join()
        if self._direct:
            _set_direct(self._descriptor, direct=False)

    def _run(self) -> None:
        while (block := self._full.get()) is not None:
            self._write(block)
            self._free.put(block)

    def _write(self, block: memoryview) -> None:
        if self.error is not None:
            return
        try:
            self._write_all(block)
        except OSError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - the caller waits for this thread
            self.error = OSError(errno.EIO, str(error))

    def _write_all(self, block: memoryview) -> None:
        written = 0
        while written < len(block):
            try:
                written += os.write(self._descriptor, block[written:])
            except OSError as error:
                # The rest of a block that was written in part, or a file system that takes the
                # flag but no such write.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                _set_direct(self._descriptor, direct=False)
                self._direct = False
        if not self._direct:
            self._unsynced += len(block)
            if self._unsynced >= _SYNC_BYTES:
                self._unsynced = 0
                os.fsync(self._descriptor)


def _set_direct(descriptor: int, *, direct: bool) -> bool:
    """Set or clear direct writing of a file; return True if that could be done."""
    if sys.platform != "linux":
        return False
    import fcntl

    with contextlib.suppress(OSError):  # a file system without it
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return True
    return False
