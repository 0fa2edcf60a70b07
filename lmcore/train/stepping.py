"""`Steps`: takes the steps of a run and gives a row for each, once its numbers are there.

On a device that works on its own a step is queued while the one before still runs, so that rows
come one step late; elsewhere at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.train.step import PendingStep, StepResult, TrainStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcore.data.loading.device_prefetch import Batches
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.engine import Step
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.loop import Reporter
    from lmcore.train.report.metrics import StepRow
    from lmcore.train.state import TrainState

__all__ = ["Steps"]


@dataclass(frozen=True)
class _Taken:
    """A step that was taken, or queued.

    Attributes:
        result: Its result, or who knows it later.
        counters: Those of the run after it.
        began, ended: When it was called, and when the call came back.
        wait: Seconds of that spent waiting for data.
    """

    result: StepResult | PendingStep
    counters: Mapping[str, int]
    began: float
    ended: float
    wait: float


class Steps:
    """The steps of a run."""

    def __init__(
        self,
        state: TrainState,
        step: Step,
        batches: Batches,
        runtime: Runtime,
        reporter: Reporter,
        exits: ExitConditions | None = None,
    ) -> None:
        """Take no step yet.

        Args:
            state: Where the run stands; changed in place.
            step: Takes one.
            batches: This process's micro-batches.
            runtime: This process.
            reporter: Makes rows.
            exits: Hears what other processes wish.
        """
        self._state, self._step, self._batches = state, step, batches
        self._reporter = reporter
        self._exits = exits if runtime.processes is not None else None
        self._waiting: list[_Taken] = []
        self._seen = 0.0  # when the last result was there

    def take(self) -> None:
        """Take a step, or queue it.

        Raises:
            NonFiniteError: Its loss or gradients are not finite, where they are known at once.
        """
        waited, began = self._batches.wait_seconds, time.perf_counter()
        call: Any = self._step
        if isinstance(self._step, TrainStep) and self._step.late:
            call = self._step.begin
        requests = () if self._exits is None else (self._exits.requests,)
        result = call(self._state, self._batches, *requests)
        self._waiting.append(
            _Taken(
                result,
                self._state.counters(),
                began,
                time.perf_counter(),
                self._batches.wait_seconds - waited,
            )
        )

    def rows(self, *, whole: bool) -> list[StepRow]:
        """Return the rows of steps that are done, in order.

        Args:
            whole: Wait for all; else a step that was just queued is left for later.

        Raises:
            NonFiniteError: The loss or the gradients of one are not finite.
        """
        rows = []
        while self._waiting:
            if not whole and len(self._waiting) == 1 and self._is_late(self._waiting[0]):
                break
            rows.append(self._row(self._waiting.pop(0)))
        return rows

    @staticmethod
    def _is_late(taken: _Taken) -> bool:
        return isinstance(taken.result, PendingStep)

    def _row(self, taken: _Taken) -> StepRow:
        began, ended, result = taken.began, taken.ended, taken.result
        if isinstance(result, PendingStep):
            result = result.result()
            # From one result to the next: the device was at work on this step alone.
            began, ended = max(began, self._seen), time.perf_counter()
            self._seen = ended
        if self._exits is not None:
            self._exits.hear(result.requests)
        return self._reporter.row(taken.counters, result, ended - began, taken.wait)
