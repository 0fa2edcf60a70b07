"""Files that are on the disk when a call returns, and directories that appear in one step."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcore.checkpoint.manifest import FileEntry

__all__ = ["DigestFile", "file_digest", "sync_directory", "write_atomically", "write_durably"]

_BUFFER_BYTES = 1024 * 1024
# Small enough that a piece is still in the processor's cache when it is hashed after the write.
_PIECE_BYTES = 1024 * 1024


class DigestFile:
    """A new binary file that is hashed while it is written, and synced when it is closed.

    A failed write is kept in `error` and raised by `check` and `close`, never by `write`:
    torch's serializer cannot be interrupted half-way without hiding the cause behind its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.error: OSError | None = None
        self._digest = hashlib.sha256()
        self._file = path.open("xb", buffering=0)
        self._stream = io.BufferedWriter(self._file, _BUFFER_BYTES)

    def write(self, content: bytes | bytearray | memoryview) -> int:
        """Append *content*; return its length even after a failure (see the class)."""
        view = memoryview(content).cast("B")
        if self.error is None:
            try:
                for start in range(0, len(view), _PIECE_BYTES):
                    piece = view[start : start + _PIECE_BYTES]
                    self._stream.write(piece)
                    self._digest.update(piece)
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
            os.fsync(self._stream.fileno())
        except OSError:
            self._abandon()
            raise
        self._stream.close()

    def entry(self) -> FileEntry:
        """Return the size and checksum for the manifest."""
        return FileEntry(size=self.size, sha256=self._digest.hexdigest())

    def _abandon(self) -> None:
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


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the file *path* in hexadecimal; other threads run meanwhile."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_durably(path: Path, content: bytes) -> FileEntry:
    """Write the new file *path* and sync it."""
    with DigestFile(path) as stream:
        stream.write(content)
    return stream.entry()


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file *path* in one step: a reader sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        write_durably(temporary, content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names inside the directory *path* durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
