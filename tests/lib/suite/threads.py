"""Threads of the test's own process, by their scheduling class."""

from __future__ import annotations

import os

__all__ = ["idle_threads"]


def idle_threads() -> list[int]:
    """Return the ids of the threads that run only while a processor is idle; on Linux."""
    found = []
    for name in os.listdir("/proc/self/task"):  # noqa: PTH208
        try:
            scheduling = os.sched_getscheduler(int(name))
        except ProcessLookupError:  # it has ended
            continue
        if scheduling == os.SCHED_IDLE:
            found.append(int(name))
    return found
