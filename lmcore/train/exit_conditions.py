"""Conditions for an exit before the last step, and for a checkpoint by time.

A run exits by a signal, a kill switch, a step interval, or a time limit.  All ranks exit or save
after the same step: the requests of each rank (`requests`) are summed over all ranks in every step,
and the sums (`set_requests`) decide.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmcore.base.signals import (
    END_SIGNALS,
    SAME_SIGNAL_SECONDS,
    handle_signals,
    raise_swallowed_signal,
    restore_signals,
)

if TYPE_CHECKING:
    from lmcore.config.section import TrainingSection
    from lmcore.train.due import Due

__all__ = ["ExitConditions"]

_BASE = 2.0**20
"""Ratio of codes in one number: sums over fewer than half a million ranks distinguish them.

The all-reduce of a step has no separate number for each, as that could change its sums."""
_CODES = {number: _BASE**index for index, number in enumerate(END_SIGNALS)}
"""Code of each signal in the requests: the mean of different ones, in float32, is none of them."""
_KILL_SWITCH = _BASE ** len(END_SIGNALS)
"""Code of the kill switch, above the sums of all others."""
_SAVE_REQUEST = 1 / _BASE
"""Request of a checkpoint by time, in the place of the time limit, whose request is 1."""
_KILL_SWITCH_SECONDS = 1.0
"""Time between two queries of the kill switch, which take milliseconds on a shared file system."""


class ExitConditions:
    """Context manager that handles `END_SIGNALS`, and is queried after each step.

    The first signal requests the run to save and exit; a second signal, some time later, is passed
    to the previous handler, so that the user can interrupt the run at once.
    """

    def __init__(
        self,
        training: TrainingSection,
        *,
        save_minutes: float = 0.0,
        is_main_rank: bool = True,
        elapsed: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            training: Exit interval, time limit and kill switch.
            save_minutes: Minutes between checkpoints; 0 for none by time.
            is_main_rank: True on rank 0, the only one that checks if the kill switch exists.
            elapsed: Seconds that the run has taken so far, which count towards the time limit.
            clock: Returns the time in seconds.
        """
        self.kill_switch = training.kill_switch_path
        self._next_query = clock() if is_main_rank and self.kill_switch is not None else math.inf
        self._is_killed = False
        self.interval = training.exit_interval
        self.seconds = (
            training.exit_duration_in_mins * 60 if training.exit_duration_in_mins else None
        )
        self.save_seconds = save_minutes * 60 if save_minutes else None
        self.clock = clock
        self._saved_at = clock()
        self.start = self._saved_at - elapsed
        self.received: signal.Signals | None = None
        self._sums: tuple[float, ...] = ()
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        self._before = handle_signals(self._receive)
        raise_swallowed_signal()  # of the time before
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
        before, self._before = self._before, {}
        restore_signals(before)

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
        """True if a signal or the kill switch ends the run, by the sums of the last step."""
        return (self._sums or self.requests())[0] > 0

    def requests(self) -> tuple[float, ...]:
        """Return this rank's requests: 1 to end, the reason as a number, what is due by time."""
        now, by_time = self.clock(), 0.0
        if now >= self._next_query and self.kill_switch is not None and not self._is_killed:
            self._next_query = now + _KILL_SWITCH_SECONDS
            self._is_killed = os.path.exists(self.kill_switch)  # noqa: PTH110 - no error if it cannot be read
        code = _KILL_SWITCH if self._is_killed else 0.0
        if self.received is not None:
            code = _CODES[self.received]
        if self.save_seconds is not None and now - self._saved_at >= self.save_seconds:
            by_time = _SAVE_REQUEST
        if self.seconds is not None and now - self.start >= self.seconds:
            by_time = 1.0
        return float(code > 0), code, by_time

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
        num_ending, codes, by_time = self._sums or self.requests()
        if num_ending:
            return self._ending_reason(num_ending, codes)
        if due.exit:
            return f"step {step} is a multiple of --exit-interval {self.interval}"
        if by_time >= 1 and self.seconds is not None:
            return f"{self.seconds / 60:g} minutes have passed (--exit-duration-in-mins)"
        return None

    def _ending_reason(self, num_ending: float, codes: float) -> str:
        """Return the reason of *num_ending* ranks to end, from the sum of their codes."""
        if self.received is not None:
            return self.signal_reason
        if codes >= _KILL_SWITCH:
            return f"the kill switch {self.kill_switch} exists"
        names = [number.name for number, code in _CODES.items() if code == codes / num_ending]
        return f"received {names[0] if names else 'several signals'}"
