"""Progress line of a command on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from lmcore.base.errors import printable

__all__ = ["ProgressLine"]

_LIVE_SECONDS = 0.1
_LOG_SECONDS = 10.0
_ProgressT = TypeVar("_ProgressT")


class ProgressLine(Generic[_ProgressT]):
    """Writes progress to standard error.

    A terminal has one line, which is overwritten at most ten times a second and cleared at the end
    of the `with` block; a log gets a line every ten seconds.

    Args:
        text: Function that returns the line of a progress.
        log: Function that returns the line for a log; default: *text*.
        every: True to write every progress in a log, unless the line is the same.

    Attributes:
        live: True if standard error is a terminal.
    """

    def __init__(
        self,
        text: Callable[[_ProgressT], str],
        *,
        log: Callable[[_ProgressT], str] | None = None,
        every: bool = False,
    ) -> None:
        self.live = sys.stderr.isatty()
        self._text = text if self.live or log is None else log
        self._seconds = _LIVE_SECONDS if self.live else 0 if every else _LOG_SECONDS
        self._last = ""
        self._shown = 0.0 if self.live else time.monotonic()

    def __call__(self, progress: _ProgressT) -> None:
        """Show *progress*, unless the last one was shown just before."""
        now = time.monotonic()
        if now - self._shown < self._seconds:
            return
        self._shown = now
        text = printable(self._text(progress))
        if text == self._last and not self.live:
            return
        self._last = text
        # On a terminal the cursor stays at the start, so that a warning is written over the line.
        start, end = ("\x1b[K", "\r") if self.live else ("", "\n")
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.live:  # later output starts on a clean line
            print("\x1b[K", end="", file=sys.stderr, flush=True)
