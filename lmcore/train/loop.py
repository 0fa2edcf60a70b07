"""The loop of a run: steps, validations, saves, exits, and the rows they leave."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.data.loader import BatchLoader
from lmcore.errors import LmcoreError
from lmcore.train.display import Progress
from lmcore.train.metrics import StepRow
from lmcore.train.validation import Validation, validate

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.corpus import Corpus
    from lmcore.train.display import Display
    from lmcore.train.engine import Step
    from lmcore.train.exits import ExitConditions
    from lmcore.train.metrics import MetricsFile, TensorBoard
    from lmcore.train.saver import Saver
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

    def row(self, state: TrainState, result: StepResult, seconds: float, wait: float) -> StepRow:
        """Return the row of a step that took *seconds*, *wait* of them for data."""
        return StepRow(
            step=state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            global_batch_size=result.samples,
            loss=result.loss if math.isfinite(result.loss) else None,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            skipped_iterations=state.skipped_iterations,
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
        after_first_step: Called once, when the first step is done.

    Raises:
        CheckpointError: A checkpoint could not be written; in the background, at the next step.
        NotFiniteError: Loss or gradients are not finite; nothing is saved then.
    """
    outcome = Outcome()
    saved_at = state.iteration
    interval = plan.config.checkpoint.save_interval
    state.model.train()
    with BatchLoader(
        corpus.train,
        micro_batch_size=plan.config.training.micro_batch_size,
        consumed_samples=state.consumed_samples,
        data_parallel_rank=state.parallel.mesh.data_rank,
        data_parallel_size=plan.layout.data,
        prefetch=plan.config.data.num_prefetch,
        pin=runtime.device.pin_memory,
        vocab_size=plan.vocab_size,
        masks=corpus.masks,
    ) as batches:
        while state.iteration < plan.train_iters:
            saver.check()
            row = timed_step(state, step, batches, runtime, reporter, exits)
            if outcome.row is None:
                after_first_step()
            outcome.row = row
            outcome.step_ms.append(row.step_time_ms)
            outcome.tokens_per_second.append(row.tokens_per_second)
            validation = _validation_due(state, corpus, plan, runtime, exits)
            if validation is not None:
                outcome.validation = (state.iteration, validation)
            reporter.report(row, validation)
            if exits.ending or state.iteration < plan.train_iters:
                outcome.reason = exits.reason(state.iteration)
            if outcome.reason:
                break
            if interval and state.iteration % interval == 0:
                outcome.checkpoint, saved_at = _save(saver, state), state.iteration
    if state.iteration > saved_at:
        outcome.checkpoint = _save(saver, state)
    if outcome.reason is None:
        outcome.test = _test(state, corpus, plan, runtime, reporter, exits)
    return outcome


def _save(saver: Saver, state: TrainState) -> Path:
    with state.weights_for_use():  # the writing too: it may be from the live tensors
        return saver.save()


def timed_step(
    state: TrainState,
    step: Step,
    batches: BatchLoader,
    runtime: Runtime,
    reporter: Reporter,
    exits: ExitConditions | None = None,
) -> StepRow:
    """Take one step and return its row; *exits* hears what other processes wish.

    The device is not waited for, but where the step reads its loss: the update that follows runs
    beside the beginning of the next step, in whose time it then counts.
    """
    waited, began = batches.wait_seconds, time.perf_counter()
    if exits is None or runtime.processes is None:
        result = step(state, batches)
    else:
        result = step(state, batches, exits.requests)
        exits.hear(result.requests)
    seconds = time.perf_counter() - began
    return reporter.row(state, result, seconds, batches.wait_seconds - waited)


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
