"""The loop of a run: steps, validations, saves, exits, and the rows they leave."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.data.loading.device_prefetch import prefetch_to_device
from lmcore.data.loading.loader import BatchLoader
from lmcore.errors import LmcoreError
from lmcore.runtime.profiler_range import no_range
from lmcore.train.garbage_collection import GarbageCollection
from lmcore.train.report.display import Progress
from lmcore.train.step_queue import StepQueue
from lmcore.train.validation import Validation, validate

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import Corpus
    from lmcore.train.engine import Step
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.report.display import Display
    from lmcore.train.report.metrics import MetricsFile, TensorBoard
    from lmcore.train.report.profiler import Profile
    from lmcore.train.resume.saver import Saver
    from lmcore.train.state import TrainState
    from lmcore.train.step_record import StepRecord

__all__ = ["Outcome", "Reporter", "failure_status", "train"]

logger = logging.getLogger(__name__)

_SPEED_WINDOW = 50


@dataclass
class Outcome:
    """How a loop ended.

    Attributes:
        reason: Why it ended before the last step; None when it did not.
        row: The last step's row.
        validation: The last validation and its step.
        test: The test at the end, where there is one.
        checkpoint: The last one saved.
        step_ms: Time of every step.
        tokens_per_second: Speed of every step.
    """

    reason: str | None = None
    row: StepRecord | None = None
    validation: tuple[int, Validation] | None = None
    test: Validation | None = None
    checkpoint: Path | None = None
    step_ms: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)


class Reporter:
    """Turns steps into rows, and gives them to file, TensorBoard and display."""

    def __init__(
        self,
        plan: RunPlan,
        runtime: Runtime,
        display: Display,
        metrics: MetricsFile | None,
        tensorboard: TensorBoard | None,
    ) -> None:
        """Ask the device for its peak once.

        Without *metrics*, as in all processes of a run but one, nobody reads the rows: no file is
        written, and no peak is asked for, which may have to be measured.
        """
        self.plan, self.display, self.metrics = plan, display, metrics
        self.tensorboard = tensorboard
        device, compute = runtime.device, runtime.precision.compute
        one = device.peak_flops(compute) if metrics and device.peak_flops else None
        self.peak = one * plan.world_size if one else None
        self._since_line: list[StepRecord] = []
        self._recent: list[float] = []

    def report(self, record: StepRecord, validation: Validation | None) -> None:
        """Complete a record by speed and validation; write and show it.

        Args:
            record: Record of a step, with its times.
            validation: Validation after the step; None without one.
        """
        samples, seconds = record.global_batch_size, record.step_time_ms / 1e3
        record.tokens_per_second = samples * self.plan.config.model.seq_length / seconds
        record.mfu = self._mfu(samples, seconds)
        if validation is not None:
            record.valid_loss, record.valid_perplexity = validation.loss, validation.perplexity
        if self.metrics is not None:
            self.metrics.write(record)
        if self.tensorboard is not None:
            self.tensorboard.write(record)
        self._since_line.append(record)
        per_sample = record.step_time_ms / record.global_batch_size
        self._recent = [*self._recent[-_SPEED_WINDOW + 1 :], per_sample]
        progress = self._progress(record)
        self.display.step(record, progress)
        if progress.ends_line:
            self._since_line.clear()
        if validation is not None:
            self.display.validation(record.step, validation.loss, validation.perplexity)

    def _mfu(self, samples: int, seconds: float) -> float | None:
        return self.plan.flops_per_sample * samples / seconds / self.peak if self.peak else None

    def _progress(self, row: StepRecord) -> Progress:
        plan, records = self.plan, self._since_line
        seconds = sum(one.step_time_ms for one in records) / 1e3
        samples = sum(one.global_batch_size for one in records)
        losses = [one.loss for one in records if one.loss is not None and not one.skipped]
        typical_ms = sorted(self._recent)[len(self._recent) // 2]
        steps_left = plan.train_iters - row.step
        samples_left = plan.batch_sizes.samples(steps_left, row.consumed_samples)
        return Progress(
            train_iters=plan.train_iters,
            seconds_left=samples_left * typical_ms / 1e3,
            skipped_iterations=sum(one.skipped for one in records),
            nan_iterations=sum(one.loss is None for one in records),
            mean_loss=sum(losses) / len(losses) if losses else None,
            mean_step_ms=seconds / len(records) * 1e3,
            mean_tokens_per_second=samples * plan.config.model.seq_length / seconds,
            mean_mfu=self._mfu(samples, seconds),
            ends_line=row.step % self.plan.config.logging.log_interval == 0,
        )


def train(
    state: TrainState,
    step: Step,
    corpus: Corpus,
    plan: RunPlan,
    runtime: Runtime,
    *,
    reporter: Reporter,
    exits: ExitConditions,
    saver: Saver,
    profile: Profile | None = None,
    after_first_step: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train until the last step, or until *exits* says so; save on the way and at the end.

    Args:
        state: Where the run stands; changed in place.
        step: Takes one step.
        corpus: Samples.
        plan: The run.
        runtime: Where to compute.
        reporter: Gets every step.
        exits: Says when to end early.
        saver: Writes checkpoints of *state*.
        profile: Hears where the run stands; None: nothing is profiled.
        after_first_step: Called once, when the first step is done.

    Raises:
        CheckpointError: A checkpoint could not be written; in the background, at the next step.
        NonFiniteError: Loss or gradients are not finite; nothing is saved then.
    """
    run = _Run(state, corpus, plan, runtime, reporter, exits, saver, profile)
    training = plan.config.training
    state.model.train()
    with (
        BatchLoader(
            corpus.train,
            micro_batch_size=training.micro_batch_size,
            consumed_samples=state.consumed_samples,
            data_parallel_rank=state.parallel.mesh.data_rank,
            data_parallel_size=plan.layout.data,
            prefetch=plan.config.data.num_prefetch,
            pin=runtime.device.pin_memory,
            vocab_size=plan.vocab_size,
            masks=corpus.masks,
            begin=runtime.device.set_current,
        ) as loader,
        GarbageCollection(
            manual=training.manual_gc, interval=training.manual_gc_interval
        ) as garbage,
    ):
        batches = prefetch_to_device(loader, runtime.device)
        queue = StepQueue(step, batches, exits if runtime.processes else None)
        run.steps(queue, garbage, after_first_step)
    return run.end()


@dataclass
class _Run:
    """The loop of `train`; see there for what it has.

    Attributes:
        outcome: What it came to so far.
        saved_at: Steps done when the last checkpoint was saved, or the run began.
    """

    state: TrainState
    corpus: Corpus
    plan: RunPlan
    runtime: Runtime
    reporter: Reporter
    exits: ExitConditions
    saver: Saver
    profile: Profile | None
    outcome: Outcome = field(default_factory=Outcome)
    saved_at: int = field(init=False)

    def __post_init__(self) -> None:
        self.saved_at = self.state.iteration

    def steps(
        self, queue: StepQueue, garbage: GarbageCollection, after_first_step: Callable[[], None]
    ) -> None:
        """Take steps until the last one, or until the run is told to end."""
        state, outcome, first = self.state, self.outcome, True
        while state.iteration < self.plan.train_iters:
            self.saver.check()
            if self.profile is not None:
                self.profile.at(state.iteration)
            queue.take()
            # The first one too: its time is that of compiling, and who errs hears of it soon.
            records = queue.finished(wait=first or self._pauses())
            if first:
                first = False
                after_first_step()
            self._report(records)
            if self.exits.ending or state.iteration < self.plan.train_iters:
                outcome.reason = self.exits.reason(state.iteration)
            if outcome.reason:
                self._report(queue.finished(wait=True))
                return
            interval = self.plan.config.checkpoint.save_interval
            if interval and state.iteration % interval == 0:
                self._save()
            garbage.at(state.iteration)

    def _pauses(self) -> bool:
        """Whether something follows this step that needs its numbers."""
        done, config = self.state.iteration, self.plan.config
        intervals = (config.checkpoint.save_interval, config.training.eval_interval)
        return done >= self.plan.train_iters or any(
            interval and done % interval == 0 for interval in intervals
        )

    def _report(self, records: list[StepRecord]) -> None:
        """Report steps; validate after the last one if that is due."""
        for record in records:
            validation = None
            if record.step == self.state.iteration:
                validation = _validation_due(
                    self.state, self.corpus, self.plan, self.runtime, self.exits
                )
            if validation is not None:
                self.outcome.validation = (record.step, validation)
            self.reporter.report(record, validation)
            self.outcome.row = record
            self.outcome.step_ms.append(record.step_time_ms)
            self.outcome.tokens_per_second.append(record.tokens_per_second)

    def _save(self) -> None:
        profiler_range = no_range if self.profile is None else self.profile.profiler_range
        with profiler_range("checkpoint"), self.state.weights_for_use():
            # The writing too: it may be from the live tensors.
            self.outcome.checkpoint = self.saver.save()
        self.saved_at = self.state.iteration

    def end(self) -> Outcome:
        """Save what is not saved, and test the weights of a run that has come to its end."""
        if self.state.iteration > self.saved_at:
            self._save()
        if self.profile is not None:
            self.profile.at(self.state.iteration, ends=True)
        if self.outcome.reason is None:
            self.outcome.test = _test(
                self.state, self.corpus, self.plan, self.runtime, self.reporter, self.exits
            )
        return self.outcome


def _validation_due(
    state: TrainState, corpus: Corpus, plan: RunPlan, runtime: Runtime, exits: ExitConditions
) -> Validation | None:
    """Validate every `eval_interval` steps and after the last one."""
    training = plan.config.training
    if corpus.valid is None or exits.ending:
        return None
    last = state.iteration >= plan.train_iters
    if not last and state.iteration % training.eval_interval:
        return None
    count = training.eval_iters * plan.global_batch_size
    number = -(-state.iteration // training.eval_interval) - 1
    with state.weights_for_use():
        return validate(
            state.parallel,
            corpus.valid,
            plan,
            runtime,
            masks=corpus.masks,
            first_sample=number * count,
            stop=lambda: exits.told_to_stop,
        )


def _test(
    state: TrainState,
    corpus: Corpus,
    plan: RunPlan,
    runtime: Runtime,
    reporter: Reporter,
    exits: ExitConditions,
) -> Validation | None:
    """Evaluate the weights that training has ended with on the test samples, and show the loss."""
    if corpus.test is None:
        return None
    with state.weights_for_use():
        found = validate(
            state.parallel,
            corpus.test,
            plan,
            runtime,
            first_sample=0,
            masks=corpus.masks,
            stop=lambda: exits.told_to_stop,
        )
    if found is not None:
        reporter.display.say(
            f" test at iteration {state.iteration} | lm loss value: {found.loss:.6E} | "
            f"lm loss PPL: {found.perplexity:.6E} |"
        )
    return found


def failure_status(error: BaseException) -> str:
    """Return what `summary.json` says of a run that ended with *error*."""
    if isinstance(error, LmcoreError):
        return f"failed: {error.what}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"failed: {type(error).__name__}: {error}"
