"""Lock files: one process holds a path, other processes see which it is and if it still runs.

A lock file names its owner by machine, process namespace, process id and start time, and is touched
every few seconds.  An owner on the same machine is dead if its process has ended; an owner
elsewhere (another host, another container) if its lock was not touched for a minute, by the clock
of the file system.  The lock of a dead owner is taken over, and so is a copy of a lock, in a
directory that was copied while its owner ran: its inode differs from the recorded one.

A new lock appears complete by one hard link, which network file systems do atomically.  Processes
that take over the same lock exclude each other by `flock` as far as the file system supports it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lmcore.base.bounded_file import UnreadableFileError, open_regular
from lmcore.base.child_process import process_start
from lmcore.base.durable import hidden_path, machine
from lmcore.base.threads import start_optional

__all__ = ["SILENT_SECONDS", "LockFile", "LockOwner"]

_log = logging.getLogger(__name__)

_BEAT_SECONDS = 3.0
SILENT_SECONDS = 60.0
"""Time without a touch after which an owner elsewhere is dead; network file systems lag behind."""
_ATTEMPTS = 5
_MAX_BYTES = 4096
_LARGEST_PID = 2**31 - 1
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class LockOwner:
    """Process that holds a lock.

    Attributes:
        machine: Identifier of the machine and process namespace in which `pid` is valid.
        host: Name of the host, for messages.
        pid: Process id.
        started: Start time of the process, in seconds after the machine's boot.
        inode: Inode of the lock file, which a copy of the file does not have; 0 if unknown.
    """

    machine: str
    host: str
    pid: int
    started: float
    inode: int = 0

    @classmethod
    def this_process(cls, inode: int = 0) -> LockOwner:
        """Return this process as the owner of the lock file *inode*."""
        pid = os.getpid()
        return cls(machine(), socket.gethostname(), pid, process_start(pid), inode)

    @classmethod
    def read(cls, path: Path) -> LockOwner | None:
        """Return the owner of the lock at *path*; None if there is none, or it is unreadable."""
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                return cls.parse(file.read(_MAX_BYTES))
        except OSError:
            return None

    @classmethod
    def parse(cls, content: bytes) -> LockOwner | None:
        """Return the owner in the content of a lock file; None if it is unreadable."""
        try:
            values = json.loads(content)
            owner = cls(
                str(values["machine"]),
                str(values["host"]),
                int(values["pid"]),
                float(values["started"]),
                int(values.get("inode", 0)),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        return owner if 0 < owner.pid <= _LARGEST_PID else None

    def is_gone(self) -> bool:
        """Return True if the process ran on this machine and has ended."""
        if not self.is_here:
            return False
        import psutil

        try:
            # Another start time: another process with the same id.
            other = abs(process_start(self.pid) - self.started) > 1
            return other or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    @property
    def is_here(self) -> bool:
        """True if the process id is valid on this machine, in this process namespace."""
        return self.machine == machine()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class LockFile:
    """A lock of this process; not held before `acquire`.

    Args:
        path: Path of the lock file; its directory exists.
        note: Text in the warning if a dead owner's lock is taken over.
    """

    def __init__(self, path: Path, *, note: str = "taking over its lock") -> None:
        self.path, self._note = path, note
        self._file: BinaryIO | None = None  # open while it is held: its inode is not used again
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free or its owner is dead; return True if it is held now.

        While it is held, a daemon thread touches it.

        Raises:
            OSError: The file system refuses, or the path is not a readable file; then the
                error's `filename` is the path of the lock.
        """
        for _ in range(_ATTEMPTS):
            if self._create() or self._take_over():
                self._over.clear()
                self._thread = threading.Thread(target=self._beat, name="lmcore-lock", daemon=True)
                if not start_optional(
                    self._thread, without=f"other hosts may take over `{self.path}`"
                ):
                    self._thread = None
                return True
            if self.path.exists():
                return False
        if self.path.is_symlink():
            raise UnreadableFileError(errno.ENOENT, "it is a link to nothing", str(self.path))
        return False

    def release(self) -> None:
        """Remove the lock if it is still held; may be called again."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.is_held():
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def is_held(self) -> bool:
        """Return True if the lock file is still there and is this process's."""
        return self._file is not None and _is_at(self._file, self.path)

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Acquire the lock for the block; yield False if another process holds it.

        Raises:
            OSError: The file system refuses.
        """
        acquired = self.acquire()
        try:
            yield acquired
        finally:
            if acquired:
                self.release()

    def owner(self) -> LockOwner | None:
        """Return the process that holds the lock; None if there is none, or it is unreadable."""
        return LockOwner.read(self.path)

    def _create(self) -> bool:
        """Create the lock file; return False if there is one."""
        with self._new() as (path, file):
            try:
                os.link(path, self.path)
            except FileExistsError:
                # The answer was lost and the request repeated: the link is this one.
                if not _is_at(file, self.path):
                    return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_without_link()
            self._file = file
            return True

    def _create_without_link(self) -> bool:
        try:
            file = self.path.open("xb")
        except FileExistsError:
            return False
        try:
            file.write(_description(file))
            file.flush()
        except OSError:
            with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
                file.close()
            self.path.unlink(missing_ok=True)
            raise
        self._file = file
        return True

    def _take_over(self) -> bool:
        """Replace the lock of a dead owner by this process's; return False if it lives."""
        try:
            old = os.fdopen(open_regular(self.path), "rb")
        except FileNotFoundError:
            return False
        with old:
            reason = self._death(old)
            if reason is None:
                return False
            with contextlib.suppress(OSError):  # not every file system has `flock`
                fcntl.flock(old, fcntl.LOCK_EX)
            if not _is_at(old, self.path):
                return False  # another process has taken it over
            with self._new() as (path, file):
                path.replace(self.path)
                self._file = file
        _log.warning("`%s`: %s; %s", self.path, reason, self._note)
        return self.is_held()

    def _death(self, lock: BinaryIO) -> str | None:
        """Return why the owner of an open lock file counts as dead; None if it lives."""
        owner = LockOwner.parse(lock.read(_MAX_BYTES))
        if owner is not None and owner.is_here:
            if owner.inode not in {0, os.fstat(lock.fileno()).st_ino}:
                return f"it is a copy of the lock of {owner}"
            return f"{owner} is gone" if owner.is_gone() else None
        silent = self._silent_seconds(lock)
        if silent <= SILENT_SECONDS:
            return None
        time.sleep(2 * _BEAT_SECONDS)  # it is touched meanwhile if only the clocks differ
        if self._silent_seconds(lock) <= silent:
            return None
        return f"{owner or 'its owner'} has been silent for {silent:.0f} s"

    def _silent_seconds(self, lock: BinaryIO) -> float:
        """Return the time since an open lock file was touched, by the file system's clock."""
        with self._new() as (_, file):
            return os.fstat(file.fileno()).st_mtime - os.fstat(lock.fileno()).st_mtime

    @contextlib.contextmanager
    def _new(self) -> Iterator[tuple[Path, BinaryIO]]:
        """Yield path and stream of a complete lock file under a name that no process uses.

        The name is removed at the end, and the stream closed unless it has become the lock's.
        """
        path = hidden_path(self.path, f"new-{os.urandom(6).hex()}")
        file = path.open("xb")
        try:
            file.write(_description(file))
            file.flush()
            yield path, file
        finally:
            path.unlink(missing_ok=True)
            if file is not self._file:
                file.close()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            if self.is_held():
                with contextlib.suppress(OSError):
                    os.utime(self.path)


def _description(file: BinaryIO) -> bytes:
    return json.dumps(vars(LockOwner.this_process(os.fstat(file.fileno()).st_ino))).encode()


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return True if *path* is the open *file*."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
