"""Program that watches a process which has to stop; `stop_limit` starts it.

    python -I -S stop_guard.py SECONDS REPEATED_SECONDS READ WRITE

It has a separate interpreter, so that it works while native code of the process keeps Python's
global lock.  From the pipe READ come the numbers of signals, which Python's own handler writes in
C, and the messages of the process; the pipe closes with the process.  To WRITE goes a question once
a second, the number of the signal: a process that does not answer in time is killed.  Only the
standard library is used.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

__all__ = ["ALIVE", "HURRY", "REQUEST", "WITHDRAWN"]

REQUEST, ALIVE, WITHDRAWN = 0x80, 0x81, 0x82
"""Messages of the process, above the numbers of signals: stop; an answer; no stop any more."""
HURRY = 0x40
"""Added to the number in a question after a second signal."""

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PERIOD = 1.0
_SAME_SIGNAL_SECONDS = 0.5
_SLACK_SECONDS = 3.0
"""Time beyond the limit in which the process may end itself, with a better message."""


class _Guard:
    """State of the process that is watched.

    Attributes:
        question: Number of the signal, perhaps with `HURRY`; None before a request to stop.
    """

    def __init__(self, seconds: float, repeated_seconds: float) -> None:
        self.question: int | None = None
        self._first, self._repeated = seconds, repeated_seconds
        self._limit = seconds
        self._requested = self._answered = 0.0

    def take(self, number: int, now: float) -> None:
        """Take a number from the pipe."""
        if number == ALIVE:
            self._answered = now
        elif number == WITHDRAWN:
            self.question, self._limit = None, self._first
        elif number != REQUEST and number not in _ENDING:
            return
        elif self.question is None:
            self._requested = self._answered = now
            self.question = 0 if number == REQUEST else number
        elif number != REQUEST and now - self._requested > _SAME_SIGNAL_SECONDS:
            if not self.question & HURRY:
                self._answered = now
            self._limit, self.question = self._repeated, HURRY | number

    def is_late(self, now: float) -> bool:
        """Return True if the process has not answered in time."""
        return self.question is not None and now - self._answered > self._limit + _SLACK_SECONDS


def main(seconds: float, repeated_seconds: float, reading: int, writing: int) -> None:
    """Watch until the pipe closes, or the process does not answer in time."""
    for number in _ENDING:  # a terminal sends them to all processes in the foreground
        signal.signal(number, signal.SIG_IGN)
    process, guard, asked = os.getppid(), _Guard(seconds, repeated_seconds), 0.0
    while True:
        wait = None if guard.question is None else _PERIOD
        received = b""
        if select.select([reading], [], [], wait)[0]:
            received = os.read(reading, 4096)
            if not received:
                return
        now = time.monotonic()
        for message in received:
            guard.take(message, now)
        if guard.is_late(now):
            _kill(process)
            return
        if guard.question is not None and now - asked >= _PERIOD:
            asked = now
            try:
                os.write(writing, bytes([guard.question]))
            except BrokenPipeError:  # the process has just ended
                return


def _kill(process: int) -> None:
    if os.getppid() != process:  # it has ended, and another process may have its number
        return
    sys.stderr.write(
        f"error: process {process} did not stop, and is killed\n"
        "why: a call of native code does not return and keeps Python's global lock\n"
    )
    sys.stderr.flush()
    os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
