"""How long each part of a run's start took, so that a slow start has a name."""

from __future__ import annotations

import time

import psutil

__all__ = ["PhaseClock"]


class PhaseClock:
    """Seconds of consecutive phases, the first one since the process was started."""

    def __init__(self) -> None:
        """Begin at the start of the process."""
        age = time.time() - psutil.Process().create_time()
        self._last = time.perf_counter() - max(age, 0.0)
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End the phase that ran until now, and call it *phase*."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
