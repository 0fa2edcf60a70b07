"""A row of `metrics.jsonl` for tests of what is reported."""

from __future__ import annotations

from typing import Any

from lmcore.train.step_record import StepRecord


def row(step: int, **changes: Any) -> StepRecord:
    """Return the record of a step; *changes* replace or add values."""
    numbers: dict[str, Any] = {
        "consumed_samples": 8 * step,
        "consumed_tokens": 128 * step,
        "global_batch_size": 8,
        "loss": 5.0 / step,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "loss_scale": 1.0,
        "skipped_iterations": 0,
        "tokens_per_second": 1e4,
        "step_time_ms": 12.5,
        "data_wait_ms": 0.25,
        "mfu": None,
    }
    return StepRecord(step=step, **(numbers | changes))
