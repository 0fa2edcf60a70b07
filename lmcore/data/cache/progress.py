"""Tells how far a long build is, from its second second on.

Builders count finished units of work in an array of one number (`lmcore.data.native.Counter`);
a thread looks at it once a second and reports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from lmcore.data.native import Counter

__all__ = ["BuildProgress", "ProgressCallback", "log_progress", "reported"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        what: What is built, such as `the sample index of train`.
        done: Finished units of work.
        total: All units of work; 0 where that is not known before the end.
        seconds: Time since the build began.
    """

    what: str
    done: int
    total: int
    seconds: float

    @property
    def fraction(self) -> float | None:
        """Finished part, 0 to 1; None where it is not known."""
        return min(self.done / self.total, 1.0) if self.total else None


ProgressCallback = Callable[[BuildProgress], None]


def log_progress(progress: BuildProgress) -> None:
    """Log a line about a build."""
    if progress.fraction is None:
        _log.info("building %s: %.0f s", progress.what, progress.seconds)
    else:
        percent = 100 * progress.fraction
        _log.info("building %s: %.0f%%, %.0f s", progress.what, percent, progress.seconds)


@contextmanager
def reported(
    what: str, total: int, callback: ProgressCallback, *, every: float = 1.0
) -> Iterator[Counter]:
    """Yield a counter for the build inside the block; report it once in *every* seconds.

    Args:
        what: What is built.
        total: All units of work, 0 if not known.
        callback: Called in a thread of its own, first after *every* seconds, so never for a
            build that is done by then.
        every: Seconds between two reports.
    """
    counter = np.zeros(1, dtype=np.int64)
    done = threading.Event()
    start = time.monotonic()

    def report() -> None:
        while not done.wait(every):
            callback(BuildProgress(what, int(counter[0]), total, time.monotonic() - start))

    thread = threading.Thread(target=report, name="lmcore-build-progress", daemon=True)
    thread.start()
    try:
        yield counter
    finally:
        done.set()
        thread.join()
