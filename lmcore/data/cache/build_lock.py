"""Lock file that lets one process build a file while other processes wait, without a collective.

The builder holds a lock file and touches it every second.  The waiting processes poll for the
finished file and check the lock: a builder on the same machine is dead if its process is gone, a
builder on another machine if the lock was not touched for a minute.  Ranks that wait this way
cannot run into the time-out of a process group, however long the build takes.

The lock only saves work.  Files appear complete and do not depend on the building process, so
two builders at once do no harm.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from lmcore.bounded_file import read_bounded_file
from lmcore.data.indexed.files import disk_errors
from lmcore.durable import machine
from lmcore.errors import DataError

__all__ = ["build_or_wait"]

_log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 16
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 60.0
"""Time without a touch after which a builder counts as dead; network file systems lag behind."""
_FIRST_POLL, _LONGEST_POLL = 0.02, 1.0
_FIRST_MESSAGE, _MESSAGE_INTERVAL = 1.0, 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class _Owner:
    """Process that holds a lock."""

    machine: str
    host: str
    pid: int
    started: float

    @classmethod
    def this_process(cls) -> _Owner:
        pid = os.getpid()
        started = psutil.Process(pid).create_time()
        return cls(machine(), socket.gethostname(), pid, started)

    @classmethod
    def read(cls, lock: Path) -> _Owner | None:
        try:
            values = json.loads(read_bounded_file(lock, _MAX_BYTES))
            return cls(
                str(values["machine"]),
                str(values["host"]),
                int(values["pid"]),
                float(values["started"]),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def is_gone(self) -> bool:
        """Return True if the process ran on this machine and has ended."""
        if self.machine != machine():
            return False
        try:
            # Another start time: another process with the same id.
            return abs(psutil.Process(self.pid).create_time() - self.started) > 1
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class _Watch:
    """Observer of a lock file that another process holds."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._seen: tuple[int, int] | None = None
        self._since = time.monotonic()
        self.owner: _Owner | None = None

    def look(self) -> bool:
        """Return True if a live process holds the lock; remove the lock of a dead one."""
        now = time.monotonic()
        try:
            found = self._lock.stat()
        except OSError:
            self._seen, self._since, self.owner = None, now, None
            return False
        touched = (found.st_ino, found.st_mtime_ns)
        if touched != self._seen:
            self._seen, self._since = touched, now
            self.owner = _Owner.read(self._lock)
        silent = now - self._since
        if self.owner is not None and self.owner.is_gone():
            self._remove(f"{self.owner} is gone")
        elif silent > _SILENT_SECONDS:
            self._remove(f"{self.owner or 'its owner'} has been silent for {silent:.0f} s")
        else:
            return True
        return False

    def _remove(self, reason: str) -> None:
        _log.warning("`%s`: %s; starting the build again", self._lock, reason)
        with suppress(OSError):
            self._lock.unlink(missing_ok=True)
        self._seen, self.owner = None, None


def build_or_wait(
    lock: Path,
    find: Callable[[], T | None],
    build: Callable[[], None],
    *,
    what: str,
    patience: float = 600.0,
) -> T:
    """Return the result of *find*; one process builds it first, other processes wait.

    Args:
        lock: Path of the lock file, in the directory that the build writes to.  Hosts without a
            shared disk see different directories, so each elects a builder of its own.
        find: Function that returns the finished result or None.  It is polled, so it has to be
            cheap when there is no result.
        build: Function that builds the result so that *find* returns it.
        what: Name of the result, for messages.
        patience: Seconds to wait without a result and without a live builder.

    Raises:
        DataError: No process built the result, or the lock cannot be written.
    """
    watch = _Watch(lock)
    start = alive = time.monotonic()
    next_message, pause = start + _FIRST_MESSAGE, _FIRST_POLL
    while True:
        with _hold(lock) as acquired:
            if acquired and find() is None:
                build()
        found = find()
        if found is not None:
            return found
        now = time.monotonic()
        if watch.look():
            alive = now
        if now - alive > patience:
            raise DataError(
                f"{what} has not appeared after {patience:.0f} s",
                why=f"no other process holds `{lock}`, and the files built here cannot be found",
                hint="check if files written to this directory stay as they were written",
            )
        if now >= next_message:
            _log.info(
                "waiting for %s, built by %s: %.0f s",
                what,
                watch.owner or "another process",
                now - start,
            )
            next_message = now + _MESSAGE_INTERVAL
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL)


@contextmanager
def _hold(lock: Path) -> Iterator[bool]:
    """Hold *lock* if it is free, and touch it every second; yield True if it was acquired."""
    try:
        with disk_errors(lock):
            handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except DataError as error:
        if not isinstance(error.__cause__, FileExistsError):
            raise
        yield False
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT_SECONDS):
            with suppress(OSError):
                os.utime(lock)

    thread = threading.Thread(target=beat, name="lmcore-build-lock", daemon=True)
    try:
        with disk_errors(lock), os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(vars(_Owner.this_process()), file)
        thread.start()
        yield True
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
        with suppress(OSError):
            lock.unlink(missing_ok=True)
