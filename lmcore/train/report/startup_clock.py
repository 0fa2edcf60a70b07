"""Clock of the start-up phases of a run, to find the cause of a slow start."""

from __future__ import annotations

import os
import time

from lmcore.base.child_process import process_start

__all__ = ["PhaseClock"]


class PhaseClock:
    """Times of consecutive phases, from the start of the process.

    Attributes:
        seconds: Time of each phase in seconds, by name.
    """

    def __init__(self) -> None:
        """Start with the first phase, which began with the process."""
        since_boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        age = time.clock_gettime(since_boot) - process_start(os.getpid())
        self._began = time.perf_counter()
        self._last = self._began - max(age, 0.0)
        self.seconds: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since this clock was made, as the command began; the process may be older."""
        return time.perf_counter() - self._began

    def mark(self, phase: str) -> None:
        """End the current phase under the name *phase*, and start the next."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
