"""Conditions for an exit before the last step, and for a checkpoint by time.

A run exits by a signal, a step interval, or a time limit.  All ranks exit or save after the same
step: the requests of each rank (`requests`) are summed over all ranks in every step, and the sums
(`set_requests`) decide.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmcore.signals import SAME_SIGNAL_SECONDS

if TYPE_CHECKING:
    from lmcore.config.section import TrainingSection
    from lmcore.train.due import Due

__all__ = ["ExitConditions"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAVE_REQUEST = 2.0**-20
"""Request of a checkpoint by time, in the place of the time limit, whose request is 1.

The sums over fewer than a million ranks distinguish them, and the all-reduce of a step has no
further number, which could change the order of its sums."""


class ExitConditions:
    """Context manager that handles SIGTERM and SIGINT, and is queried after each step.

    The first signal requests the run to save and exit; a second signal, some time later, is passed
    to the previous handler, so that the user can interrupt the run at once.
    """

    def __init__(
        self,
        training: TrainingSection,
        *,
        save_minutes: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            training: Exit interval and time limit.
            save_minutes: Minutes between checkpoints; 0 for none by time.
            clock: Returns the time in seconds.
        """
        self.interval = training.exit_interval
        self.seconds = (
            training.exit_duration_in_mins * 60 if training.exit_duration_in_mins else None
        )
        self.save_seconds = save_minutes * 60 if save_minutes else None
        self.clock = clock
        self.start = self._saved_at = clock()
        self.received: signal.Signals | None = None
        self._sums: tuple[float, ...] = ()
        self._received_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the previous signal handlers."""
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
        elif now - self._received_at > SAME_SIGNAL_SECONDS:
            self._restore()
            signal.raise_signal(number)

    @property
    def signalled(self) -> bool:
        """True if this process has received a signal."""
        return self.received is not None

    @property
    def signal_reason(self) -> str:
        """Reason for the end of a run by a signal, outside of its steps."""
        if self.received is None:
            return "another process received a signal"
        return f"received {self.received.name}"

    @property
    def ending(self) -> bool:
        """True if a signal ends the run, by the sums over all ranks of the last step."""
        return any((self._sums or self.requests())[: len(_SIGNALS)])

    def requests(self) -> tuple[float, ...]:
        """Return this rank's requests: 0 or 1 for each signal, then what is due by time."""
        signals = [float(self.received == number) for number in _SIGNALS]
        now, by_time = self.clock(), 0.0
        if self.save_seconds is not None and now - self._saved_at >= self.save_seconds:
            by_time = _SAVE_REQUEST
        if self.seconds is not None and now - self.start >= self.seconds:
            by_time = 1.0
        return (*signals, by_time)

    def set_requests(self, requests: tuple[float, ...]) -> None:
        """Replace this process's requests by their sums over all ranks."""
        self._sums = requests

    def save_is_due(self, due: Due) -> bool:
        """Return True if a checkpoint by time is due, by the sums over all ranks of the last step.

        Args:
            due: Work that is due after the step; the last step saves anyway.
        """
        return not due.last and 0 < (self._sums or self.requests())[-1] < 1

    def saved(self) -> None:
        """Begin to count the time to the next checkpoint."""
        self._saved_at = self.clock()
        if self._sums and self._sums[-1] < 1:  # of a step before the save
            self._sums = (*self._sums[:-1], 0.0)

    def reason(self, step: int, due: Due) -> str | None:
        """Return the reason for the run to exit after *step*; None to continue.

        After the last step a signal is the only reason.

        Args:
            step: Number of steps done.
            due: Work that is due after the step.
        """
        if due.last and not self.ending:
            return None
        *signals, by_time = self._sums or self.requests()
        for number, wanted in zip(_SIGNALS, signals, strict=True):
            if wanted:
                return f"received {number.name}"
        if due.exit:
            return f"step {step} is a multiple of --exit-interval {self.interval}"
        if by_time >= 1 and self.seconds is not None:
            return f"{self.seconds / 60:g} minutes have passed (--exit-duration-in-mins)"
        return None
