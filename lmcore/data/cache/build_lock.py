"""Election of the process that builds a file while other processes wait, without a collective.

The builder holds a lock file (`lmcore.base.lock`).  The waiting processes poll for the finished
file and take over the lock if the builder has died.  Ranks that wait this way cannot run into the
time-out of a process group, however long the build takes.

The lock only saves work.  Files appear complete and do not depend on the building process, so
two builders at once do no harm.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lmcore.base.errors import DataError
from lmcore.base.lock import LockFile
from lmcore.base.signals import deferred_signals
from lmcore.data.indexed.files import disk_errors

__all__ = ["build_or_wait"]

_log = logging.getLogger(__name__)

_FIRST_POLL, _LONGEST_POLL = 0.02, 1.0
_FIRST_MESSAGE, _MESSAGE_INTERVAL = 1.0, 30.0

T = TypeVar("T")


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
            shared disk see different directories, so each host elects a builder.
        find: Function that returns the finished result or None.  It is polled, so it has to be
            cheap when there is no result.
        build: Function that builds the result so that *find* returns it.
        what: Name of the result, for messages.
        patience: Seconds to wait without a result and without a live builder.

    Raises:
        DataError: No process built the result, or the lock cannot be written.
    """
    guard = LockFile(lock, note="starting the build again")
    start = alive = time.monotonic()
    next_message, pause = start + _FIRST_MESSAGE, _FIRST_POLL
    while True:
        try:
            with disk_errors(lock), deferred_signals():  # an interrupt leaves no lock
                acquired = guard.acquire()
            if acquired and find() is None:
                build()
        finally:
            with deferred_signals():
                guard.release()
        found = find()
        if found is not None:
            return found
        now = time.monotonic()
        if not acquired:
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
                guard.owner() or "another process",
                now - start,
            )
            next_message = now + _MESSAGE_INTERVAL
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL)
