"""Progress reports of long builds, after one second and then every ten.

Builders count finished units of work in an array of one element (`lmcore.data.native.Counter`);
a thread reads it and reports.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from lmcore.base.threads import periodically
from lmcore.data.native import Counter

__all__ = ["BuildProgress", "ProgressCallback", "log_progress", "report_progress"]

_log = logging.getLogger(__name__)
_LATER = 10
"""Time between later reports, as a multiple of the time before the first one."""


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build.

    Attributes:
        what: Name of the result, such as `the sample index of train`.
        done: Finished units of work.
        total: All units of work; 0 if unknown before the end.
        seconds: Time since the build began.
    """

    what: str
    done: int
    total: int
    seconds: float

    @property
    def fraction(self) -> float | None:
        """Finished fraction, 0 to 1; None if unknown."""
        return min(self.done / self.total, 1.0) if self.total else None


ProgressCallback = Callable[[BuildProgress], None]


def log_progress(progress: BuildProgress) -> None:
    """Log the progress of a build in one line."""
    if progress.fraction is None:
        _log.info("building %s: %.0f s", progress.what, progress.seconds)
    else:
        percent = 100 * progress.fraction
        _log.info("building %s: %.0f%%, %.0f s", progress.what, percent, progress.seconds)


@contextmanager
def report_progress(
    what: str, total: int, callback: ProgressCallback, *, first: float = 1.0
) -> Iterator[Counter]:
    """Yield a counter for the build inside the block, and report it periodically.

    Args:
        what: Name of the result, for messages.
        total: All units of work; 0 if unknown.
        callback: Function that gets each report, in a separate thread.  A build that ends
            within *first* seconds is not reported.
        first: Seconds until the first report; later reports are ten times as far apart.

    Yields:
        int64 [1]: number of finished units of work, to be increased by the build.
    """
    counter = np.zeros(1, dtype=np.int64)
    start = time.monotonic()
    turns = itertools.count()

    def report() -> None:
        if next(turns) % _LATER == 0:
            callback(BuildProgress(what, int(counter[0]), total, time.monotonic() - start))

    with periodically(report, first, name="lmcore-build-progress", without="no progress is shown"):
        yield counter
