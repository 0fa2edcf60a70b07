"""Clock of the start-up phases of a run, to find the cause of a slow start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

__all__ = ["PhaseClock"]


class PhaseClock:
    """Times of consecutive phases, from the start of the process.

    Attributes:
        seconds: Time of each phase in seconds, by name.
    """

    def __init__(self) -> None:
        """Start with the first phase, which began with the process."""
        self._last = time.perf_counter() - max(_process_age(), 0.0)
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End the current phase under the name *phase*, and start the next."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def _process_age() -> float:
    """Return the seconds since this process was started."""
    try:
        # Field 22, in ticks since the boot.  psutil counts from the wall clock, which jumps if a
        # virtual machine is suspended.
        started = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # no Linux
        return time.time() - psutil.Process().create_time()
