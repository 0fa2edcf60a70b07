"""The loop of a run: steps, validations, saves, exits, and the rows they leave."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.data.loading.device_prefetch import on_device
from lmcore.data.loading.loader import BatchLoader
from lmcore.errors import LmcoreError
from lmcore.runtime.profiler_range import no_range
from lmcore.train.garbage_collection import GarbageCollection
from lmcore.train.report.display import Progress
from lmcore.train.report.metrics import StepRow
from lmcore.train.stepping import Steps
from lmcore.train.validation import Validation, validate

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.device_prefetch import Batches
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import Corpus
    from lmcore.train.engine import Step
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.report.display import Display
    from lmcore.train.report.metrics import MetricsFile, TensorBoard
    from lmcore.train.report.profiler import Profile
    from lmcore.train.resume.saver import Saver
    from lmcore.train.state import TrainState
    from lmcore.train.step import StepResult

__all__ = ["Outcome", "Reporter", "failure_status", "timed_step", "train"]

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
    row: StepRow | None = None
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
        self._rows: list[StepRow] = []
        self._recent: list[float] = []

    def row(
        self, counters: Mapping[str, int], result: StepResult, seconds: float, wait: float
    ) -> StepRow:
        """Return the row of a step that took *seconds*, *wait* of them for data.

        Args:
            counters: The run's after the step; see `TrainState.counters`.
            result: What the step yielded.
            seconds: Its time.
            wait: The part of it spent waiting for data.
        """
        return StepRow(
            step=counters["iteration"],
            consumed_samples=counters["consumed_samples"],
            consumed_tokens=counters["consumed_tokens"],
            global_batch_size=result.samples,
            loss=result.loss if math.isfinite(result.loss) else None,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            skipped_iterations=counters["skipped_iterations"],
            tokens_per_second=result.samples * self.plan.config.model.seq_length / seconds,
            step_time_ms=seconds * 1e3,
            data_wait_ms=wait * 1e3,
            mfu=self._mfu(result.samples, seconds),
        )

    def _mfu(self, samples: int, seconds: float) -> float | None:
        return self.plan.flops_per_sample * samples / seconds / self.peak if self.peak else None

    def report(self, row: StepRow, validation: Validation | None) -> None:
        """Write and show a row, with the validation that followed it."""
        if validation is not None:
            row = replace(row, valid_loss=validation.loss, valid_perplexity=validation.perplexity)
        if self.metrics is not None:
            self.metrics.write(row)
        if self.tensorboard is not None:
            self.tensorboard.write(row)
        self._rows.append(row)
        per_sample = row.step_time_ms / row.global_batch_size
        self._recent = [*self._recent[-_SPEED_WINDOW + 1 :], per_sample]
        self.display.step(row, self._progress(row))
        if row.step % self.plan.config.logging.log_interval == 0:
            self._rows.clear()
        if validation is not None:
            self.display.validation(row.step, validation.loss, validation.perplexity)

    def _progress(self, row: StepRow) -> Progress:
        plan, rows = self.plan, self._rows
        seconds = sum(one.step_time_ms for one in rows) / 1e3
        samples = sum(one.global_batch_size for one in rows)
        losses = [one.loss for one in rows if one.loss is not None and not one.skipped]
        typical_ms = sorted(self._recent)[len(self._recent) // 2]
        steps_left = plan.train_iters - row.step
        samples_left = plan.batch_sizes.samples(steps_left, row.consumed_samples)
        return Progress(
            train_iters=plan.train_iters,
            seconds_left=samples_left * typical_ms / 1e3,
            skipped_iterations=sum(one.skipped for one in rows),
            nan_iterations=sum(one.loss is None for one in rows),
            mean_loss=sum(losses) / len(losses) if losses else None,
            mean_step_ms=seconds / len(rows) * 1e3,
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
        steps = Steps(state, step, on_device(loader, runtime.device), runtime, reporter, exits)
        run.steps(steps, garbage, after_first_step)
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
        self, steps: Steps, garbage: GarbageCollection, after_first_step: Callable[[], None]
    ) -> None:
        """Take steps until the last one, or until the run is told to end."""
        state, outcome, first = self.state, self.outcome, True
        while state.iteration < self.plan.train_iters:
            self.saver.check()
            if self.profile is not None:
                self.profile.at(state.iteration)
            steps.take()
            # The first one too: its time is that of compiling, and who errs hears of it soon.
            rows = steps.rows(whole=first or self._pauses())
            if first:
                first = False
                after_first_step()
            self._report(rows)
            if self.exits.ending or state.iteration < self.plan.train_iters:
                outcome.reason = self.exits.reason(state.iteration)
            if outcome.reason:
                self._report(steps.rows(whole=True))
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

    def _report(self, rows: list[StepRow]) -> None:
        """Report steps; validate after the last one where that is due."""
        for row in rows:
            self.outcome.row = row
            self.outcome.step_ms.append(row.step_time_ms)
            self.outcome.tokens_per_second.append(row.tokens_per_second)
            validation = None
            if row.step == self.state.iteration:
                validation = _validation_due(
                    self.state, self.corpus, self.plan, self.runtime, self.exits
                )
            if validation is not None:
                self.outcome.validation = (row.step, validation)
            self.reporter.report(row, validation)

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


def timed_step(
    state: TrainState,
    step: Step,
    batches: Batches,
    runtime: Runtime,
    reporter: Reporter,
    exits: ExitConditions | None = None,
) -> StepRow:
    """Take one step, wait for its numbers and return its row.

    *exits* hears what other processes wish.
    """
    steps = Steps(state, step, batches, runtime, reporter, exits)
    steps.take()
    (row,) = steps.rows(whole=True)
    return row


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
