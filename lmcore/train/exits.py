"""Why a run ends before its last step: a signal, a step, or the clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from lmcore.config.section import TrainingSection

__all__ = ["ExitConditions"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ExitConditions:
    """Asked after each step; a context manager that listens to SIGTERM and SIGINT meanwhile.

    The first signal asks the run to save and end; a second one is given to the handler that was
    there before, so that an impatient user gets out.
    """

    def __init__(
        self, training: TrainingSection, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to count the time."""
        self.interval = training.exit_interval
        self.seconds = (
            training.exit_duration_in_mins * 60 if training.exit_duration_in_mins else None
        )
        self.clock = clock
        self.start = clock()
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Listen to the signals."""
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the handlers back that were there before."""
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()

    @property
    def told_to_stop(self) -> bool:
        """Whether a signal came."""
        return self.received is not None

    def reason(self, iteration: int) -> str | None:
        """Return why the run ends after step *iteration*, or None to go on."""
        if self.received:
            return f"received {self.received}"
        if self.interval and iteration % self.interval == 0:
            return f"step {iteration} is a multiple of --exit-interval {self.interval}"
        if self.seconds is not None and self.clock() - self.start >= self.seconds:
            return f"{self.seconds / 60:g} minutes have passed (--exit-duration-in-mins)"
        return None
