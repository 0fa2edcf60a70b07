"""The first lines of a run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.optim.schedule import LearningRateSchedule
from lmcore.train.report.announcement import _schedule


def plan_of(schedule: LearningRateSchedule) -> Any:
    """Return what the line reads of a plan with this schedule, in steps of 8 samples."""
    return SimpleNamespace(
        lr_warmup_samples=schedule.warmup_samples,
        lr_decay_samples=schedule.decay_samples,
        global_batch_size=8,
        batch_sizes=SimpleNamespace(ramp_samples=0),
    )


@pytest.mark.parametrize(
    "samples, words",
    [
        (0, "warm-up none,"),
        (4, "warm-up over 0.5 steps,"),
        (8, "warm-up over 1 step,"),
        (16_000, "warm-up over 2,000 steps,"),
    ],
)
def test_warm_up_is_counted_in_steps(samples: int, words: str) -> None:
    """The schedule's line has the number of warm-up steps, in the singular for one."""
    schedule = LearningRateSchedule("cosine", 2e-3, 0.0, samples, 32_000)
    assert words in _schedule(plan_of(schedule), schedule)


def test_a_schedule_that_is_not_of_the_settings_comes_with_its_end() -> None:
    """A kept or restarted schedule ends where the settings do not say."""
    schedule = LearningRateSchedule("cosine", 2e-3, 0.0, 8, 80)
    plan = plan_of(schedule)
    assert _schedule(plan, schedule).endswith("cosine decay to 0")
    kept = dataclasses.replace(schedule, decay_samples=40)
    assert _schedule(plan, kept).endswith("cosine decay to 0 after 5 steps")
    restarted = dataclasses.replace(schedule, start_samples=80)
    words = "learning rate 0.002, restarted after 10 steps, warm-up over 1 step, cosine decay to 0"
    assert _schedule(plan, restarted) == f"{words} after 20 steps"
