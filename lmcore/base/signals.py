"""Signals that end a run: raised as exceptions, held back for a while, or sent again by the user.

A signal that is ignored when the command starts, as SIGHUP under `nohup`, stays ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = [
    "END_SIGNALS",
    "SAME_SIGNAL_SECONDS",
    "TerminatedError",
    "clean_termination",
    "deferred_signals",
    "end_status",
    "end_word",
    "handle_signals",
    "raise_swallowed_signal",
    "restore_signals",
]

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a run: schedulers and users choose among them, a logout sends SIGHUP."""
SAME_SIGNAL_SECONDS = 0.5
"""Time within which two signals are one: launcher, terminal and scheduler may all forward it."""

_Handler = Callable[[int, FrameType | None], Any] | int | None


def end_status(number: int) -> int:
    """Return the exit status of a process that a signal ended, as a shell reports it."""
    return 128 + number


def end_word(number: int) -> str:
    """Return the last line, and the status in `summary.json`, of a run that a signal ended."""
    words = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    return words.get(signal.Signals(number), f"terminated by {signal.Signals(number).name}")


class TerminatedError(SystemExit):
    """A signal as an exception: the command ends with its `end_status`.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(end_status(number))
        self.number = number


class _Swallowed:
    """The signal that `clean_termination` raised last; None if it raised none."""

    error: BaseException | None = None


def raise_swallowed_signal() -> None:
    """Raise the exception of a signal again, if code in between caught it.

    Modules that catch every exception of their imports do so, and imports take seconds.
    """
    if _Swallowed.error is not None:
        raise _Swallowed.error


def handle_signals(handler: Callable[[int, FrameType | None], Any]) -> dict[int, _Handler]:
    """Handle the signals that end a run by *handler*; return the previous handlers.

    To be used in the main thread.
    """
    numbers = [number for number in END_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def restore_signals(before: dict[int, _Handler]) -> None:
    """Set the handlers that `handle_signals` returned."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def clean_termination() -> Iterator[None]:
    """Let a signal end the block as an exception does, so that no temporary file or lock stays.

    SIGINT is a `KeyboardInterrupt`, any other signal a `TerminatedError`.  To be used in the main
    thread.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        interrupted = number == signal.SIGINT
        _Swallowed.error = KeyboardInterrupt() if interrupted else TerminatedError(number)
        raise _Swallowed.error

    _Swallowed.error = None
    before = handle_signals(end)
    try:
        yield
    finally:
        restore_signals(before)
        _Swallowed.error = None


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back the signals that end a run until the block ends; do nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = handle_signals(lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        restore_signals(before)
        if received:
            signal.raise_signal(received[0])
