"""The training loop: steps, validations, checkpoints and early exits.

Control of Python's garbage collector: it runs between steps, on all ranks after the same step.

Left alone, Python traverses all its objects now and then, for a tenth of a second and more, in the
middle of a step and on each rank in another step; the other ranks then wait in the next collective.
A step leaves next to no garbage.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lmcore.data.loading.device_prefetch import prefetch_to_device
from lmcore.data.loading.loader import BatchLoader
from lmcore.train.diagnose.device_health import DeviceCheck
from lmcore.train.diagnose.replica_drift import ReplicaCheck
from lmcore.train.due import DueSchedule
from lmcore.train.step_queue import StepQueue
from lmcore.train.task_scores import TaskEvaluator
from lmcore.train.validation import Evaluator

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import RunDatasets
    from lmcore.train.due import Due
    from lmcore.train.engine import Engine
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.report.run_report import RunReport
    from lmcore.train.resume.save import Saver
    from lmcore.train.resume.validation_history import ValidationHistory
    from lmcore.train.state import TrainState
    from lmcore.train.task_scores import TaskScores
    from lmcore.train.validation import Validation


__all__ = [
    "GarbageCollection",
    "train",
]


class GarbageCollection:
    """Context manager in which garbage is collected at an interval of steps.

    The first collection traverses all objects; the objects that remain are frozen, so that later
    collections take milliseconds.
    """

    def __init__(self, *, manual: bool, interval: int) -> None:
        """Change nothing yet.

        Args:
            manual: True to collect between steps; False to leave the collector to Python.
            interval: Number of steps between two collections; 0 for no collection.
        """
        self._manual, self._interval = manual, interval
        self._enabled = self._began = self._frozen = False

    def on_step(self, done: int) -> None:
        """Disable Python's collector at the first call; collect at multiples of the interval.

        To be called between steps, first after the first step, which imports and compiles much.

        Args:
            done: Number of steps done.
        """
        if not self._manual:
            return
        if not self._began:
            self._began, self._enabled = True, gc.isenabled()
            gc.disable()
        elif self._interval and done % self._interval == 0:
            gc.collect()
            if not self._frozen:
                self._frozen = True
                gc.freeze()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Enable Python's collector again."""
        if self._frozen:
            gc.unfreeze()
        if self._enabled:
            gc.enable()


logger = logging.getLogger(__name__)


def train(
    engine: Engine,
    datasets: RunDatasets,
    plan: RunPlan,
    runtime: Runtime,
    report: RunReport,
    saver: Saver,
    exits: ExitConditions,
    history: ValidationHistory,
) -> None:
    """Train until the last step or an early exit; save on the way and, by default, at the end.

    Args:
        engine: Model and step; its state is changed.
        datasets: Samples for training, validation and test.
        plan: The run.
        runtime: Device and processes.
        report: Receives every step, every checkpoint, and the reason for an early exit.
        saver: Writes checkpoints of the engine's state.
        exits: Conditions for an early exit.
        history: Validation losses of the run; they may end it, too.

    Raises:
        CheckpointError: A checkpoint could not be written; if it was written in the background,
            raised before the next step.
        DeviceHealthError, NonFiniteError, ReplicaDriftError: A fault was found; not saved.
    """
    state, profile, training = engine.state, report.profile, plan.config.training
    schedule, saves_final = DueSchedule(plan), plan.config.checkpoint.save_final
    evaluator = Evaluator(state, datasets, plan, runtime, exits, history)
    tasks = TaskEvaluator(state, datasets.tasks, datasets.tokenizer, plan, runtime, exits)
    evaluation = _evaluation(evaluator, tasks, plan)
    replicas = ReplicaCheck(state, runtime, interval=schedule.check_replicas_interval)
    start_step = last_saved = state.iteration
    health = DeviceCheck(state, runtime.device, interval=schedule.check_device_interval)
    state.model.train()
    replicas.check()
    garbage = GarbageCollection(manual=training.manual_gc, interval=training.manual_gc_interval)
    with _loader(state, datasets, plan, runtime) as loader, garbage:
        batches = prefetch_to_device(loader, runtime.device)
        exit_reason, stopped_early = None, history.early_stop_reason(plan, state.iteration)
        queue = StepQueue.of(engine, batches, plan, runtime, exits, report.compilation)
        while state.iteration < plan.train_iters and stopped_early is None:
            saver.raise_background_error()
            profile.on_step(state.iteration)
            queue.submit(state.iteration + 1)
            step, is_first = state.iteration, state.iteration == start_step + 1
            due = schedule.due(step)
            # The first record is waited for, too: its time is the time of compiling, and a mistake
            # shows early.
            records = queue.completed(wait=is_first or due.needs_records)
            if is_first:
                report.first_step()
            for record in records:
                evaluates = record.step == step and not exits.ending
                report.step(record, *(evaluation(step, due) if evaluates else ()))
            replicas.after_step(due)
            health.after_step(due)
            exit_reason = exits.reason(step, due)
            stopped_early = history.early_stop_reason(plan, step)
            if exit_reason:
                report.reason = exit_reason
                break
            ends = saves_final and (due.last or stopped_early is not None)
            is_best = plan.config.checkpoint.save_best and history.best_step == step and not ends
            if due.save or is_best or exits.save_is_due(due):
                last_saved = _save(state, saver, report, queue, replicas, timed=not due.save)
                exits.saved()
            garbage.on_step(step)
        for record in queue.completed(wait=True):  # left if the run exits early
            report.step(record)
    report.end_steps()
    unsaved = state.iteration > last_saved
    if saves_final and (unsaved or _starts_elsewhere(plan, report, state.iteration)):
        _save(state, saver, report, queue, replicas)
    profile.on_step(state.iteration, ends=True)
    if exit_reason is None:
        report.reason = stopped_early
        _test(state, datasets, evaluator, report, exits)


def _evaluation(
    evaluator: Evaluator, tasks: TaskEvaluator, plan: RunPlan
) -> Callable[[int, Due], tuple[Validation | None, TaskScores | None]]:
    """Return a function of a step and its due work that evaluates what is due then."""

    def evaluate(step: int, due: Due) -> tuple[Validation | None, TaskScores | None]:
        validation = evaluator.validate(step) if due.validate else None
        ends = evaluator.history.early_stop_reason(plan, step) is not None
        return validation, tasks.evaluate() if due.tasks or ends else None

    return evaluate


def _starts_elsewhere(plan: RunPlan, report: RunReport, step: int) -> bool:
    """Return True if *step* is the one of a loaded checkpoint, which is in another directory."""
    start, directory = plan.resume, report.directory.path
    finetune = plan.config.checkpoint.finetune
    if start is None or (start.foreign and finetune) or report.checkpoint is not None:
        return False
    if start.checkpoint.parent.parent.resolve() == directory.resolve():
        return False
    logger.warning(
        "no step is left to train: the loaded weights of step %d are saved to %s as they are",
        *(step, directory),
    )
    return True


def _loader(
    state: TrainState, datasets: RunDatasets, plan: RunPlan, runtime: Runtime
) -> BatchLoader:
    """Return the loader of the training samples that this rank has not seen yet."""
    return BatchLoader(
        datasets.train,
        micro_batch_size=plan.config.training.micro_batch_size,
        consumed_samples=state.consumed_samples,
        data_parallel_rank=state.parallel.mesh.data_rank,
        data_parallel_size=plan.layout.data,
        prefetch=plan.config.data.num_prefetch,
        pin=runtime.device.pin_memory,
        collation=datasets.collation,
        begin=runtime.device.set_current,
    )


def _test(
    state: TrainState,
    datasets: RunDatasets,
    evaluator: Evaluator,
    report: RunReport,
    exits: ExitConditions,
) -> None:
    """Evaluate the test set, if there is one, and report the result."""
    test = evaluator.test()
    if test is None and datasets.test is not None:
        report.reason = exits.signal_reason  # not complete: the next start evaluates the test
    report.test_result(state.iteration, test)


def _save(
    state: TrainState,
    saver: Saver,
    report: RunReport,
    queue: StepQueue,
    replicas: ReplicaCheck,
    *,
    timed: bool = False,
) -> int:
    """Save a checkpoint and return its step; see `Saver.save`.

    Replicas are compared first, so that every checkpoint of the run is from equal replicas.
    """
    for record in queue.completed(wait=True):  # their numbers show if the weights are finite
        report.step(record)
    replicas.check()
    with report.profile.profiler_range("checkpoint"), state.evaluation_weights():
        # Writing is within the context, too: it may be from the live tensors.
        report.checkpoint = saver.save(timed=timed)
    return state.iteration
