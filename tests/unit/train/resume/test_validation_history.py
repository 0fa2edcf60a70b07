"""The best validation loss of a run, and its early stop."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.train.resume.validation_history import KEY, ValidationHistory

LOSSES = [3.0, 2.0, 2.1, 1.95, 1.9, 2.0, 1.7]


def test_the_best_loss_and_validations_without_improvement() -> None:
    """The best is the lowest of all; improvements below the delta do not restart the count."""
    history, counts = ValidationHistory(), []
    for step, loss in enumerate(LOSSES, start=1):
        history.add(step, loss, delta=0.15)
        counts.append((history.best_step, history.without_improvement))
    assert counts == [(1, 0), (2, 0), (2, 1), (4, 2), (5, 3), (5, 4), (7, 0)]
    assert (history.best_loss, history.reference_loss) == (1.7, 1.7)


def test_an_equal_loss_is_no_improvement() -> None:
    """The first of equal losses stays the best."""
    history = ValidationHistory()
    for step in (1, 2, 3):
        history.add(step, 2.0)
    assert (history.best_step, history.without_improvement) == (1, 2)


def test_early_stop(make_plan: Any) -> None:
    """A run stops at the limit, but not at its last step."""
    plan = make_plan("--train-iters 9 --eval-iters 1 --early-stop 2")
    history = ValidationHistory(2.0, 1, 2.0, without_improvement=1)
    assert history.early_stop_reason(plan, 5) is None
    history.add(5, 2.5)
    reason = history.early_stop_reason(plan, 5)
    assert reason == "stopped early: 2 validations without a loss below 2.0000 (--early-stop 2)"
    wide = make_plan("--train-iters 9 --eval-iters 1 --early-stop 2 --early-stop-delta 0.5")
    assert history.early_stop_reason(wide, 5) == (
        "stopped early: 2 validations without a loss below 1.5000 (--early-stop 2 "
        "--early-stop-delta 0.5)"
    )
    assert history.early_stop_reason(plan, 9) is None
    assert history.early_stop_reason(make_plan("--train-iters 9"), 5) is None


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("--eval-iters 2", True),
        ("--eval-iters 3", False),
        ("--eval-iters 2 --lr 0.5", True),
        ("--eval-iters 2 --finetune", False),
    ],
)
def test_a_run_that_resumes(make_plan: Any, caplog: Any, flags: str, kept: bool) -> None:
    """It continues the history, unless its validation samples are other ones."""
    caplog.set_level("INFO")
    before = dataclasses.asdict(make_plan("--train-iters 9 --eval-iters 2").config)
    saved = ValidationHistory(2.0, 4, 2.1, 1)
    manifest = SimpleNamespace(meta={KEY: saved.to_dict(), "config": {"config": before}})
    plan = make_plan(f"--train-iters 9 {flags.removesuffix(' --finetune')}")
    checkpoint = dataclasses.replace(plan.config.checkpoint, finetune="finetune" in flags)
    config = dataclasses.replace(plan.config, checkpoint=checkpoint)
    plan = dataclasses.replace(plan, config=config, resume=SimpleNamespace(manifest=manifest))
    assert ValidationHistory.announced(plan) == (saved if kept else ValidationHistory())
    assert ("`eval_iters` changed" in caplog.text) == ("3" in flags)


@pytest.mark.parametrize(
    "split, more, kept",
    [
        ("969,30,1", "", True),
        ("969,30,1", " --eval-iters 3", False),
        ("1,0,0", "", False),
    ],
)
def test_named_sets_beside_the_validation_data(
    make_plan: Any, data_prefix: str, caplog: Any, split: str, more: str, kept: bool
) -> None:
    """The loss is of the other validation data, if there are any: sets do not change it."""
    caplog.set_level("INFO")
    words = f"--valid-data old={data_prefix} --split {split} --eval-iters 2"
    before = dataclasses.asdict(make_plan(words).config)
    saved = ValidationHistory(2.0, 4, 2.1, 1)
    manifest = SimpleNamespace(meta={KEY: saved.to_dict(), "config": {"config": before}})
    words = f"--valid-data web={data_prefix} --split {split}{more or ' --eval-iters 2'}"
    plan = dataclasses.replace(make_plan(words), resume=SimpleNamespace(manifest=manifest))
    assert ValidationHistory.announced(plan) == (saved if kept else ValidationHistory())
    assert ("are not compared" in caplog.text) != kept
