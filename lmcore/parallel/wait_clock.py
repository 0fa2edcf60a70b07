"""`WaitClock`: the time of a step that a rank works itself, without its waits for other ranks.

A step takes equally long on all ranks, as each waits for the slowest rank in the collectives; only
the time without these waits shows which rank that is.  Blocks that wait are within `with clock:`,
collectives in code that may be compiled are called by `clock.wait`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lmcore.contract.device import Device

__all__ = ["WaitClock"]


class WaitClock:
    """Context manager of a wait, and the clock of a step; outside of steps it does nothing.

    On a device that works asynchronously the host does not wait in a collective, but the device's
    current stream does: times are taken there, by events.

    Attributes:
        on_host: True if times are the host's.
        available: False if the device's events have no times: nothing is measured.
    """

    def __init__(self, mark: Callable[[], Any] = time.perf_counter) -> None:
        """Measure by *mark*, which returns the time in seconds or records and returns an event."""
        self._mark, self.on_host = mark, mark is time.perf_counter
        self.available = True
        self._running = False
        self._began: Any = None
        self._since: Any = None  # begin of the present wait
        self._depth = 0  # a collective may call another
        self._waits: list[tuple[Any, Any]] = []

    @classmethod
    def of(cls, device: Device) -> WaitClock:
        """Return the clock of a device: by events if it has them, else by the host's time."""
        if device.new_event is None:
            return cls()

        def mark() -> torch.Event:
            event = torch.Event(device.torch_device, enable_timing=True)
            event.record()
            return event

        clock = cls(mark)
        try:
            _between(mark(), mark())
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            clock.available = False
        return clock

    def start(self) -> None:
        """Begin a step."""
        self._running, self._depth, self._waits = True, 0, []
        self._began = self._mark()

    def stop(self) -> Callable[[], float]:
        """End the step; return a function that returns the seconds of this rank's own work.

        With events, the function waits until the device has done the step.
        """
        began, ended, waits = self._began, self._mark(), self._waits
        self._running = False
        return lambda: _between(began, ended) - sum(_between(*wait) for wait in waits)

    def __enter__(self) -> None:
        """Begin a wait."""
        if not self._running:
            return
        self._depth += 1
        if self._depth == 1:
            self._since = self._mark()

    def __exit__(self, *_: object) -> None:
        """End the wait."""
        if not self._running:
            return
        self._depth -= 1
        if self._depth == 0:
            self._waits.append((self._since, self._mark()))

    def wait(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what *collective* returns; its call is a wait, but in compiled code."""
        if torch.compiler.is_compiling():
            return collective(*arguments, **options)
        with self:
            return collective(*arguments, **options)

    def interrupted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return *work*, called within a wait, as a function that is no part of the wait."""

        def run(*arguments: Any, **options: Any) -> Any:
            if self._depth != 1:
                return work(*arguments, **options)
            self.__exit__()
            try:
                return work(*arguments, **options)
            finally:
                self.__enter__()

        return run


def _between(begin: Any, end: Any) -> float:
    """Return the seconds between two marks."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
