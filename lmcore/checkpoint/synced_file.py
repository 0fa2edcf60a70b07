"""Files that are checksummed while they are written, and on the disk when they are closed."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcore.checkpoint.manifest import FileEntry
from lmcore.crc32 import crc32
from lmcore.threads import start_optional

__all__ = [
    "SyncedFile",
    "file_checksum",
    "num_io_threads",
    "write_durably",
]

SENDER_NAME = "lmcore-checkpoint-sync"
_BUFFER_BYTES = 64 * 1024
# Small enough that a piece is still in the processor's cache for its checksum, after the write.
_PIECE_BYTES = 1024 * 1024
# Large enough that a sync is worth its call, small enough that the disk is never idle for long.
_SEND_BYTES = 16 * 1024 * 1024


class SyncedFile:
    """A new binary file that is checksummed while it is written, and synced when it is closed.

    A second thread syncs it while it is written, so that `close` waits for the last part only.  A
    failure is kept in `error` and raised by `check` and `close`, never by `write`: torch's
    serializer would hide it behind another error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.error: OSError | None = None
        self._checksum = 0
        self._file = path.open("xb", buffering=0)
        self._stream = io.BufferedWriter(self._file, _BUFFER_BYTES)
        self._unsent = 0
        self._sender: _Sender | None = None

    def write(self, content: bytes | bytearray | memoryview) -> int:
        """Append *content*; return its length even after a failure (see the class)."""
        view = memoryview(content).cast("B")
        try:
            for start in range(0, len(view), _PIECE_BYTES):
                if self.error is not None:
                    break
                self._write_piece(view[start : start + _PIECE_BYTES])
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
            self._stream.flush()
            self._stop_sending()
            self.check()
            os.fsync(self._file.fileno())
        except OSError:
            self._abandon()
            raise
        self._stream.close()

    def entry(self) -> FileEntry:
        """Return the size and checksum for the manifest."""
        return FileEntry(size=self.size, crc32=self._checksum)

    def _write_piece(self, piece: memoryview) -> None:
        self._stream.write(piece)
        self._checksum = crc32(piece, self._checksum)
        self._unsent += len(piece)
        if self._unsent >= _SEND_BYTES:
            self._unsent = 0
            if self._sender is None:
                self._sender = _Sender(self._file.fileno())
            self._sender.send()
            self.error = self._sender.error

    def _stop_sending(self) -> None:
        if self._sender is not None:
            self._sender.stop()
            # The system reports a lost write once, perhaps to the sender and not to this thread.
            self.error = self.error or self._sender.error
            self._sender = None

    def _abandon(self) -> None:
        self._stop_sending()
        # A buffered stream flushes again when it is closed, and fails again for the same reason.
        try:
            self._stream.close()
        except OSError:
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


class _Sender:
    """A thread that syncs a file to the disk at each request."""

    def __init__(self, descriptor: int) -> None:
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._requested = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=SENDER_NAME, daemon=True)
        self._started = start_optional(self._thread)  # without it the file is synced at its end

    def send(self) -> None:
        self._requested.set()

    def stop(self) -> None:
        self._stopping = True
        self._requested.set()
        if self._started:
            self._thread.join()

    def _run(self) -> None:
        while self.error is None:
            self._requested.wait()
            self._requested.clear()
            if self._stopping:
                return
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self.error = error


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
