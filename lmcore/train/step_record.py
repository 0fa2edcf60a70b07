"""The record of one optimizer step, made by the engine that takes the step, read by the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcore.train.state import TrainState

__all__ = ["PendingStep", "StepRecord"]


@dataclass(kw_only=True)
class StepRecord:
    """The numbers of one step, equal on all ranks except for times; a row of `metrics.jsonl`.

    The engine fills in the numbers of the training, the step queue the times, and the report speed
    and validation.

    Attributes:
        step: Number of the step, from 1.
        consumed_samples, consumed_tokens: Samples and tokens of the run up to this step.
        global_batch_size: Number of samples in the step, over all ranks.
        loss: Mean loss of the step's valid targets, in nats; None if it is not finite, which is
            possible for skipped steps only.
        losses: The losses that it is the sum of, by `Loss.key`, if the family has several; in the
            row by their names.
        learning_rate: Learning rate of the update; if the step was skipped, of the last update.
        grad_norm: Gradient norm before clipping; None if the step was skipped.
        loss_scale: Loss scale after the step; 1 without loss scaling.
        skipped_iterations: Number of skipped steps in the run up to this step.
        tokens_per_second: Tokens of the step divided by its time; None if it compiled.
        step_time_ms: Wall time of the step in milliseconds, including the wait for data.
        data_wait_ms: Time that the step waited for data, in milliseconds.
        rank_time_min_ms, rank_time_median_ms, rank_time_max_ms: Time of a step that a rank works
            itself, of the fastest rank, the median and the slowest rank; None between the exchanges
            of `RankTimer`.
        slowest_rank: Rank with the largest time; None as the times.
        compiles: True if something was compiled in the step; else None.
        compilations, compile_seconds: Number of the programs that the device of rank 0 compiled in
            the step, and their time; None if there were none, or if the device does not tell.
        mfu: Model-FLOPs utilisation of the step, from 0 to 1; None if the peak is unknown, or if
            the step compiled.
        valid_loss: Validation loss after the step; None without a validation.
        valid_perplexity: exp(min(20, loss)) of the loss of tokens; None without one.
        valid_sets: Numbers of each named validation set by name.
        tasks: Scores of tasks after the step: for each task its numbers by name.
        task_seconds: Time that they took; None without scores.
        params_norm: Norm of the parameters after the step, with `--log-params-norm`; None if it is
            not finite.
        num_zeros_in_grad: Number of zeros in the gradients, with `--log-num-zeros-in-grad`; None if
            the step was skipped.
        memory_allocated_bytes, memory_max_allocated_bytes, memory_reserved_bytes: Memory of rank
            0's device when the step is reported, with `--log-memory-to-tensorboard`; None if the
            device does not tell.
        valid: Further numbers of the validation by name: each loss, if there are several, and
            accuracies; in the row with `valid_` before the name.
        exit_requests: Number of ranks that request each exit condition; not part of the row.
    """

    step: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    loss: float | None = None
    learning_rate: float
    grad_norm: float | None = None
    loss_scale: float = 1.0
    skipped_iterations: int = 0
    tokens_per_second: float | None = None
    step_time_ms: float = 0.0
    data_wait_ms: float = 0.0
    rank_time_min_ms: float | None = None
    rank_time_median_ms: float | None = None
    rank_time_max_ms: float | None = None
    slowest_rank: int | None = None
    compiles: bool | None = None
    compilations: int | None = None
    compile_seconds: float | None = None
    mfu: float | None = None
    valid_loss: float | None = None
    valid_perplexity: float | None = None
    valid_sets: dict[str, dict[str, float]] = field(default_factory=dict)
    tasks: dict[str, dict[str, float | None]] = field(default_factory=dict)
    task_seconds: float | None = None
    params_norm: float | None = None
    num_zeros_in_grad: int | None = None
    memory_allocated_bytes: int | None = None
    memory_max_allocated_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    losses: dict[str, float] = field(default_factory=dict)
    valid: dict[str, float] = field(default_factory=dict)
    exit_requests: tuple[float, ...] = ()

    @classmethod
    def count(
        cls, state: TrainState, samples: int, seq_length: int, learning_rate: float
    ) -> StepRecord:
        """Count a step in *state* and return its record, as yet without loss and gradient norm.

        Args:
            state: State of the run; its counters are changed.
            samples: Number of samples in the step, over all ranks.
            seq_length: Number of tokens in a sample.
            learning_rate: Learning rate of the step.
        """
        state.iteration += 1
        state.consumed_samples += samples
        state.consumed_tokens += samples * seq_length
        return cls(
            step=state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            global_batch_size=samples,
            learning_rate=learning_rate,
            loss_scale=state.loss_scale.value,
            skipped_iterations=state.skipped_iterations,
        )

    def complete(
        self,
        losses: Mapping[str, float],
        grad_norm: float | None,
        exit_requests: tuple[float, ...],
    ) -> StepRecord:
        """Fill in the numbers that the device computes; return the record.

        Args:
            losses: Each mean loss over all ranks by its key, in nats; may be NaN or infinite.
            grad_norm: Gradient norm before clipping; None if the step was skipped.
            exit_requests: Number of ranks that request each exit condition.
        """
        loss = sum(losses.values())
        self.loss = loss if math.isfinite(loss) else None
        if len(losses) > 1 and self.loss is not None:
            self.losses = dict(losses)
        self.grad_norm, self.exit_requests = grad_norm, exit_requests
        return self

    @property
    def skipped(self) -> bool:
        """True if the step updated nothing because of an overflow."""
        return self.grad_norm is None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values, without the values that are None."""
        row = asdict(self)
        del row["exit_requests"]
        losses, valid = row.pop("losses"), row.pop("valid")
        row |= losses | {f"valid_{name}": value for name, value in valid.items()}
        return {name: value for name, value in row.items() if value is not None and value != {}}


class PendingStep:
    """A step that the engine has queued, and perhaps not yet finished.

    Attributes:
        finished: True if the step was finished when the engine returned it.
        ready: Returns True if `result` returns without waiting for the device; None: unknown.
    """

    def __init__(
        self,
        read: Callable[[], StepRecord],
        *,
        ready: Callable[[], bool | None],
        finished: bool = False,
    ) -> None:
        """Keep *read*, which returns the record of the step; it is called once."""
        self.result, self.ready, self.finished = read, ready, finished

    @classmethod
    def of(cls, record: StepRecord) -> PendingStep:
        """Return a step that is finished, with its record."""
        return cls(lambda: record, ready=lambda: True, finished=True)
