"""`Speed`: speed, model-FLOPs utilisation and memory of a run's steps, and its progress."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcore.model.family import family_of
from lmcore.train.due import DueSchedule
from lmcore.train.report.display import RunProgress

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.contract.memory_stats import MemoryStats
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.step_record import StepRecord

__all__ = ["Speed"]

logger = logging.getLogger(__name__)

_WINDOW = 50
"""Number of steps in the estimate of the remaining time."""


class Speed:
    """Speed of the steps of this session.

    Attributes:
        num_steps, compiling_steps: Number of all steps, and of those in which something was
            compiled, which are in no figure of speed.
        step_ms: Time of each other step, in milliseconds.
        tokens_per_second: Speed of each other step, over all ranks.
        peak: Peak of all devices together, in FLOP/s; None if it is unknown or proved too low.
    """

    def __init__(self, plan: RunPlan, runtime: Runtime) -> None:
        """Measure nothing yet.

        Args:
            plan: The run.
            runtime: Rank and device, whose memory is read on rank 0.
        """
        self.plan = plan
        self._memory = _memory_of_rank_0(plan, runtime)
        self.num_steps = self.compiling_steps = 0
        self.step_ms: list[float] = []
        self.tokens_per_second: list[float] = []
        self.peak: float | None = None
        self._schedule = DueSchedule(plan)
        self._since_line: list[StepRecord] = []
        self._recent_ms_per_sample: deque[float] = deque(maxlen=_WINDOW)

    def complete(self, record: StepRecord) -> None:
        """Set speed and MFU of a step's record, unless the step compiled, and memory if wanted."""
        self.num_steps += 1
        if self._memory is not None:
            memory = self._memory()
            record.memory_allocated_bytes = memory.allocated
            record.memory_max_allocated_bytes = memory.peak_allocated
            record.memory_reserved_bytes = memory.reserved
        if record.compiles:
            self.compiling_steps += 1
            return
        samples, seconds = record.global_batch_size, record.step_time_ms / 1e3
        record.tokens_per_second = samples * self.plan.config.model.seq_length / seconds
        record.mfu = self.mfu(samples, seconds)
        self.step_ms.append(record.step_time_ms)
        self.tokens_per_second.append(record.tokens_per_second)
        self._recent_ms_per_sample.append(record.step_time_ms / samples)

    def summary(self) -> dict[str, Any]:
        """Return the figures for `summary.json`."""
        rates = self.tokens_per_second
        return {
            "median_step_ms": statistics.median(self.step_ms) if self.step_ms else None,
            "median_tokens_per_second": statistics.median(rates) if rates else None,
            "compiling_steps": self.compiling_steps,
        }

    def progress(self, record: StepRecord) -> RunProgress:
        """Return the progress of the run after a step, and means since the last training line."""
        self._since_line.append(record)
        return self._progress(record, ends_line=self._schedule.due(record.step).log)

    def last_progress(self, record: StepRecord) -> RunProgress | None:
        """Return the progress after the last step of a session; None if its line was due itself.

        A run that ends early may end between two training lines, or before its first.
        """
        return self._progress(record, ends_line=True) if self._since_line else None

    def _progress(self, record: StepRecord, *, ends_line: bool) -> RunProgress:
        plan, records = self.plan, self._since_line
        timed = [each for each in records if not each.compiles]
        seconds = sum(each.step_time_ms for each in timed or records) / 1e3
        samples = sum(each.global_batch_size for each in timed)
        losses = [each.loss for each in records if each.loss is not None and not each.skipped]
        recent = self._recent_ms_per_sample
        steps_left = plan.train_iters - record.step
        samples_left = plan.batch_sizes.samples(steps_left, record.consumed_samples)
        progress = RunProgress(
            train_iters=plan.train_iters,
            seconds_left=samples_left * statistics.median_high(recent) / 1e3 if recent else None,
            skipped_iterations=sum(each.skipped for each in records),
            nan_iterations=sum(each.loss is None for each in records),
            mean_loss=sum(losses) / len(losses) if losses else None,
            loss_name=family_of(plan.shape).losses[0].name,
            mean_losses=_means([each.losses for each in records if not each.skipped]),
            mean_step_ms=seconds / len(timed or records) * 1e3,
            mean_tokens_per_second=samples * plan.config.model.seq_length / seconds
            if timed
            else None,
            mean_mfu=self.mfu(samples, seconds) if timed else None,
            ends_line=ends_line,
            compiling_steps=len(records) - len(timed),
        )
        if progress.ends_line:
            records.clear()
        return progress

    def mfu(self, samples: int, seconds: float) -> float | None:
        """Return the model-FLOPs utilisation; None if the peak is unknown or proves too low.

        The CPU's peak is measured when training starts: other processes that take its cores then
        and rest later make it too low.

        Args:
            samples: Number of samples, over all ranks.
            seconds: Time that they took.
        """
        if not self.peak:
            return None
        mfu = self.plan.flops_per_sample * samples / seconds / self.peak
        if mfu <= 1:
            return mfu
        logger.warning(
            "MFU is no longer shown: a step was faster than the device's peak of %.4g GFLOP/s, "
            "which is too low (if it was measured: the machine was busy then)",
            self.peak / 1e9,
        )
        self.peak = None
        return None


def _memory_of_rank_0(plan: RunPlan, runtime: Runtime) -> Callable[[], MemoryStats] | None:
    """Return the function that reads the device memory; None if it is not wanted or not known."""
    device = runtime.device
    if runtime.rank.rank or not plan.config.logging.log_memory_to_tensorboard:
        return None
    if device.memory_stats is None:
        logger.warning(
            "`--log-memory-to-tensorboard` records nothing: %s",
            device.missing.get("memory_stats", "the device does not tell its memory"),
        )
    return device.memory_stats


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each loss over the steps that have it."""
    known = [row for row in rows if row]
    return (
        {name: sum(row[name] for row in known) / len(known) for name in known[0]} if known else {}
    )
