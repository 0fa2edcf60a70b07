"""A watchdog that ends the process of a check that hangs, also in code that holds the interpreter.

A step hangs if the main thread stays in the same functions for some seconds.  Code that compiles or
imports is in other functions every moment, so that it may take longer, up to the step's own limit.
A loop of one call, or a native call, that is right and takes longer needs `--patience`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator

from lmcore.base.threads import periodically

__all__ = ["SILENCE", "watched"]

SILENCE = 20.0
"""Seconds without progress after which a step counts as hung."""

_LOOKS = 16
"""Number of times that the stack is compared in this time."""


@contextlib.contextmanager
def watched(silence: float, longest: float) -> Iterator[None]:
    """End this process, with the stacks of its threads on standard error, if the block hangs.

    Args:
        silence: Seconds for which the main thread may stay in the same functions.
        longest: Seconds that the block may take in all.
    """
    deadline = time.monotonic() + longest
    main = threading.main_thread().ident or 0
    lock = threading.Lock()
    is_over = False
    last = _stack(main)

    def arm() -> None:
        left = max(0.01, deadline - time.monotonic())
        faulthandler.dump_traceback_later(min(silence, left), exit=True)

    def compare() -> None:
        nonlocal last
        now = _stack(main)
        with lock:
            if now != last and not is_over:
                last = now
                arm()

    arm()
    try:
        without = "a step that takes long without a hang may be ended"
        with periodically(compare, silence / _LOOKS, name="lmcore-watchdog", without=without):
            yield
    finally:
        with lock:
            is_over = True
            faulthandler.cancel_dump_traceback_later()


def _stack(thread: int) -> list[tuple[int, int]]:
    """Return the functions on a thread's stack, with the lines of their calls."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way to see a thread
    found = []
    innermost = True
    while frame is not None:
        # Lines of a loop that waits in the innermost function are no progress.
        found.append((id(frame.f_code), 0 if innermost else frame.f_lineno))
        frame, innermost = frame.f_back, False
    return found
