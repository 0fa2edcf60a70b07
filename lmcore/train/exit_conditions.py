"""Why a run ends before its last step: a signal, a step, or the clock.

The processes of a run end at the same step: each one's wishes (`requests`) are summed over all of
them in every step, and what came out (`hear`) decides.
"""

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
_SAME_SIGNAL_SECONDS = 0.05
"""A launcher and a terminal may both pass on what the user sent once."""


class ExitConditions:
    """Asked after each step; a context manager that listens to SIGTERM and SIGINT meanwhile.

    The first signal asks the run to save and end; a second one, some time later, is given to the
    handler that was there before, so that an impatient user gets out.
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
        self.received: signal.Signals | None = None
        self._agreed: tuple[float, ...] = ()
        self._received_at = 0.0
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
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
        elif now - self._received_at > _SAME_SIGNAL_SECONDS:
            self._restore()
            signal.raise_signal(number)

    @property
    def told_to_stop(self) -> bool:
        """Whether a signal came to this process."""
        return self.received is not None

    @property
    def ending(self) -> bool:
        """Whether a signal ends the run, as all processes agreed in the last step."""
        return any((self._agreed or self.requests())[: len(_SIGNALS)])

    def requests(self) -> tuple[float, ...]:
        """Return this process's wishes to end: for each signal, and for the clock."""
        told = [float(self.received == number) for number in _SIGNALS]
        late = self.seconds is not None and self.clock() - self.start >= self.seconds
        return (*told, float(late))

    def set_requests(self, requests: tuple[float, ...]) -> None:
        """Replace this process's requests by their sums over all ranks."""
        self._agreed = requests

    def reason(self, iteration: int) -> str | None:
        """Return why the run ends after step *iteration*, or None to go on."""
        *told, late = self._agreed or self.requests()
        for number, wanted in zip(_SIGNALS, told, strict=True):
            if wanted:
                return f"received {number.name}"
        if self.interval and iteration % self.interval == 0:
            return f"step {iteration} is a multiple of --exit-interval {self.interval}"
        if late and self.seconds is not None:
            return f"{self.seconds / 60:g} minutes have passed (--exit-duration-in-mins)"
        return None
