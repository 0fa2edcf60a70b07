"""`StepQueue`: takes the steps of a run and returns their records in order.

An asynchronous engine queues a step on the device while the step before is still running, so that
records come one step late; a synchronous engine's record is there at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from lmcore.train.rank_times import RankTimer

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.contract.compilations import Compilations
    from lmcore.data.loading.device_prefetch import Batches
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.engine import Engine, Step
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.report.compilation_watch import CompilationWatch
    from lmcore.train.step_record import PendingStep, StepRecord

__all__ = ["StepQueue"]


class _Queued(NamedTuple):
    """A step in the queue, and its times in seconds: begin and end of the call, wait for data.

    Attributes:
        compiled: Programs that the device compiled in the call; None if there were none.
    """

    pending: PendingStep
    began: float
    ended: float
    data_wait: float
    compiled: Compilations | None


class StepQueue:
    """The steps of a run that are taken, but not yet reported."""

    def __init__(
        self,
        step: Step,
        batches: Batches,
        exits: ExitConditions | None = None,
        timer: RankTimer | None = None,
        watch: CompilationWatch | None = None,
    ) -> None:
        """Create an empty queue.

        Args:
            step: The engine's step.
            batches: Micro-batches of this rank.
            exits: Exit conditions to be summed over the ranks with each step; None in a run of one
                process.
            timer: Timer of the ranks; None to measure this rank alone.
            watch: Watch over the compilations in the steps; None for none.
        """
        self._step, self._batches, self._exits, self._timer = step, batches, exits, timer
        self._watch = watch if watch is not None and watch.active else None
        self._queue: list[_Queued] = []
        self._last_read = 0.0  # time at which the last step was finished

    @classmethod
    def of(
        cls,
        engine: Engine,
        batches: Batches,
        plan: RunPlan,
        runtime: Runtime,
        exits: ExitConditions,
        watch: CompilationWatch,
    ) -> StepQueue:
        """Return the queue of a run; the exit conditions are summed over several processes."""
        timer = RankTimer.of(plan, engine.state.parallel.mesh, runtime)
        return cls(engine.step, batches, exits if runtime.processes else None, timer, watch)

    def submit(self, step: int) -> None:
        """Run the next step and queue its record.

        Args:
            step: Number of the step.

        Raises:
            NonFiniteError: Loss or gradients are not finite, and the engine is synchronous.
        """
        requests = () if self._exits is None else (self._exits.requests,)
        if self._watch is not None:
            self._watch.begin_step(step)
        waited, began = self._batches.wait_seconds, time.perf_counter()
        if self._timer is not None:
            self._timer.start()
        pending = self._step(self._batches, *requests)
        if self._timer is not None:
            self._timer.stop()
        ended, waited = time.perf_counter(), self._batches.wait_seconds - waited
        compiled = None if self._watch is None else self._watch.take()
        self._queue.append(_Queued(pending, began, ended, waited, compiled))

    def completed(self, *, wait: bool) -> list[StepRecord]:
        """Return the records of completed steps, in order, and remove them from the queue.

        Args:
            wait: True to wait for all steps; False to leave the last one if it is still running.

        Raises:
            NonFiniteError: Loss or gradients of a step are not finite.
        """
        records = []
        while self._queue and (wait or len(self._queue) > 1 or self._queue[0].pending.finished):
            records.append(self._read(self._queue.pop(0)))
        if self._watch is not None:
            self._watch.end_step()
        return records

    def _read(self, queued: _Queued) -> StepRecord:
        began, ended = queued.began, queued.ended
        ready = queued.pending.ready()
        asked = time.perf_counter() if ready is None else 0.0
        record = queued.pending.result()
        if ready is None:
            # The device does not tell: the call waited for some of the work, and this for the rest.
            ended += time.perf_counter() - asked
        elif not ready:
            # From one result to the next: the device was at work on this step alone.
            began, ended = max(began, self._last_read), time.perf_counter()
        # Else the device was faster than the host, or computes synchronously: the step took the
        # time of its call.
        self._last_read = max(self._last_read, ended)
        record.step_time_ms = (ended - began) * 1e3
        record.data_wait_ms = queued.data_wait * 1e3
        if self._watch is not None:
            self._watch.complete(record, queued.compiled, self._watch.take())
        if self._exits is not None:
            self._exits.set_requests(record.exit_requests)
        if self._timer is not None:
            self._timer.complete(record)
        return record
