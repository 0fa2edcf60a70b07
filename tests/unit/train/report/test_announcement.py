"""The first lines of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.config.section.checkpoint import CheckpointSection
from lmcore.config.section.optimizer import OptimizerSection
from lmcore.train.report.announcement import _schedule


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
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(optimizer=OptimizerSection(), checkpoint=CheckpointSection()),
        lr_warmup_samples=samples,
        global_batch_size=8,
        batch_sizes=SimpleNamespace(ramp_samples=0),
    )
    assert words in _schedule(plan, resumed=False)
