"""The work that is due after a step."""

from __future__ import annotations

from typing import Any

import pytest

from lmcore.train.due import DueSchedule


@pytest.mark.parametrize(
    "flags, work, steps",
    [
        ("--log-interval 3", "log", [3, 6, 8]),
        ("--log-interval 10", "log", [8]),
        ("--save-interval 4", "save", [4, 8]),
        ("", "save", []),
        ("--exit-interval 5", "exit", [5]),
        ("", "exit", []),
        ("--split 80,20,0 --eval-interval 3 --eval-iters 1", "validate", [3, 6, 8]),
        ("--split 80,20,0 --eval-interval 9 --eval-iters 1", "validate", [8]),
        ("--eval-interval 3 --eval-iters 0", "validate", []),
        ("", "last", [8]),
        ("--save-interval 4", "needs_records", [4, 8]),
        ("--log-interval 1 --exit-interval 2", "needs_records", [8]),
    ],
)
def test_due(make_plan: Any, flags: str, work: str, steps: list[int]) -> None:
    """Work is due at the multiples of its interval; a line and validation after the last step."""
    schedule = DueSchedule(make_plan(f"--train-iters 8 {flags}"))
    assert [step for step in range(1, 9) if getattr(schedule.due(step), work)] == steps
