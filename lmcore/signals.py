"""SIGINT and SIGTERM: raised as exceptions, held back for a while, or repeated by the user."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = [
    "SAME_SIGNAL_SECONDS",
    "TERMINATED",
    "TerminatedError",
    "clean_termination",
    "deferred_signals",
]

SAME_SIGNAL_SECONDS = 0.05
"""Time within which two signals are one: launcher and terminal may both forward it."""
TERMINATED = 128 + signal.SIGTERM
"""Exit status of a process that SIGTERM ended, as a shell reports it."""


class TerminatedError(SystemExit):
    """SIGTERM as an exception: the command ends with the status `TERMINATED`."""

    def __init__(self) -> None:
        """Set the exit status."""
        super().__init__(TERMINATED)


@contextmanager
def clean_termination() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does, so that no temporary file or lock stays.

    To be used in the main thread.
    """

    def end(_number: int, _frame: object) -> NoReturn:
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the block ends; do nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
