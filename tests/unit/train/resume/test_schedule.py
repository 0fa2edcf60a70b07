"""Learning-rate schedule of a run that resumes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.optim.schedule import LearningRateSchedule
from lmcore.train.resume.schedule import (
    changed_fields,
    schedule_choices,
    schedule_is_open,
)

BASE = "--global-batch-size 4 --micro-batch-size 4 --lr 0.01"


@pytest.fixture
def saved_by(make_plan: Any) -> Any:
    """Returns the manifest of a run of these flags after some steps."""

    def make(flags: str, steps: int, in_force: LearningRateSchedule | None = None) -> Any:
        plan = make_plan(f"{BASE} {flags}")
        schedule = in_force or LearningRateSchedule.from_plan(plan)
        fields = {name: value for name, value in vars(schedule).items() if value != 0}
        fields |= {"lowest": schedule.lowest, "warmup_samples": schedule.warmup_samples}
        counters = {"iteration": steps, "consumed_samples": steps * 4}
        meta = {"schedule": fields, "counters": counters, "config": plan.to_dict()}
        return SimpleNamespace(meta=meta, iteration=steps)

    return make


@pytest.mark.parametrize(
    "before, now, changed",
    [
        ("--train-iters 8", "--train-iters 8", []),
        ("--train-iters 8", "--train-iters 9", ["warmup_samples", "decay_samples"]),
        ("--train-iters 8 --lr-decay-iters 9", "--train-iters 9 --lr-decay-iters 9", []),
        ("--train-iters 8 --lr-decay-style constant", "--train-iters 9", None),
        (
            "--train-iters 8 --lr-decay-style constant",
            "--train-iters 9 --lr-decay-style constant",
            [],
        ),
        (
            "--train-iters 100 --lr-decay-style constant",
            "--train-iters 200 --lr-decay-style constant",
            ["warmup_samples"],  # step 4 is within both
        ),
        (
            "--train-iters 8 --lr-decay-style inverse-square-root --lr-warmup-iters 2",
            "--train-iters 9 --lr-decay-style inverse-square-root --lr-warmup-iters 2",
            ["decay_samples"],
        ),
        ("--train-iters 8", "--train-iters 8 --min-lr 0.001", ["lowest"]),
    ],
)
def test_settings_that_change_the_schedule(
    make_plan: Any, saved_by: Any, before: str, now: str, changed: list[str] | None
) -> None:
    """Only fields that change the rates count; without one there is no question."""
    plan, manifest = make_plan(f"{BASE} {now}"), saved_by(before, 4)
    found = changed_fields(manifest, LearningRateSchedule.from_plan(plan))
    if changed is None:
        assert found["style"] == ("constant", "cosine")
    else:
        assert list(found) == changed
    assert schedule_is_open(plan, manifest) == bool(found)


def test_the_schedule_in_force_may_differ_from_the_settings(make_plan: Any, saved_by: Any) -> None:
    """A schedule that was kept or restarted continues without a further question."""
    plan = make_plan(f"{BASE} --train-iters 9")
    kept = LearningRateSchedule("cosine", 0.01, 0.0, 2.0, 32)
    assert not schedule_is_open(plan, saved_by("--train-iters 9", 4, kept))
    older = saved_by("--train-iters 9", 4, kept)
    del older.meta["config"]["derived"]
    assert schedule_is_open(plan, older), "what an older version recorded is the schedule alone"
    wrong = saved_by("--train-iters 9", 4, kept)
    wrong.meta["config"]["derived"]["lr_warmup_samples"] = "two"
    assert schedule_is_open(plan, wrong)


@pytest.mark.parametrize(
    "flag",
    ["--schedule keep", "--use-checkpoint-opt-param-scheduler", "--override-opt-param-scheduler"],
)
def test_an_answer_closes_the_question(make_plan: Any, saved_by: Any, flag: str) -> None:
    """Each of them says which schedule follows."""
    plan = make_plan(f"{BASE} --train-iters 9 {flag}")
    assert not schedule_is_open(plan, saved_by("--train-iters 8", 4))


def test_the_choices_and_their_rates(make_plan: Any, saved_by: Any) -> None:
    """A restart begins at the checkpoint and ends with the run, also after skipped steps."""
    plan = make_plan(f"{BASE} --train-iters 16 --lr-warmup-fraction 0.25 --min-lr 0.001")
    manifest = saved_by("--train-iters 8 --lr-warmup-fraction 0.25", 8)
    manifest.meta["counters"]["scheduled_samples"] = 24  # two steps were skipped
    extend, keep, restart = schedule_choices(plan, manifest, LearningRateSchedule.from_plan(plan))
    assert (extend.schedule.warmup_samples, extend.schedule.decay_samples) == (16, 64)
    assert keep.schedule.decay_samples == 32
    assert not keep.is_zero, "the position is 28 of 32 samples"
    assert (restart.schedule.start_samples, restart.schedule.decay_samples) == (24, 32)
    assert restart.next_rate == 0.01 * 4 / 8
    assert restart.last_rate == 0.001
    assert restart.words.endswith("rate 0.005 at the next step, 0.001 at the end")


def test_a_schedule_that_ends_before_the_run(make_plan: Any, saved_by: Any) -> None:
    """The step from which the rate stays is named."""
    plan = make_plan(f"{BASE} --train-iters 16 --min-lr 0.001")
    own = LearningRateSchedule.from_plan(plan)
    before = "--train-iters 8 --min-lr 0.001"
    left = 0.5 + 0.5 * math.cos(math.pi * (6 * 4 - 1.6) / (32 - 1.6))
    for done, rate in ((5, 0.001 + 0.009 * left), (8, 0.001)):
        _, keep, _ = schedule_choices(plan, saved_by(before, done), own)
        assert keep.words.endswith(
            f": rate {rate:.3g} at the next step, 0.001 from step {max(8, done + 1)} on"
        )


def test_the_last_rates_of_an_inverse_square_root(make_plan: Any, saved_by: Any) -> None:
    """The step at the end of the decay still has the root's rate, the next one the lowest."""
    flags = "--lr-decay-style inverse-square-root --lr-warmup-iters 2 --min-lr 0.001"
    plan = make_plan(f"{BASE} --train-iters 16 {flags}")
    manifest = saved_by(f"--train-iters 8 {flags}", 5)
    own = LearningRateSchedule.from_plan(plan)
    _, keep, _ = schedule_choices(plan, manifest, own)
    assert keep.schedule(8 * 4) == pytest.approx(0.01 * math.sqrt(2 / 8))
    assert keep.words.endswith(", 0.001 from step 9 on")


def test_a_decay_by_flag_is_not_extended(make_plan: Any, saved_by: Any) -> None:
    """Beside `--schedule extend` the user's length of the decay holds."""
    manifest = saved_by("--train-iters 8", 8)
    plan = make_plan(f"{BASE} --train-iters 16 --lr-decay-iters 12")
    extend, *_ = schedule_choices(plan, manifest, LearningRateSchedule.from_plan(plan))
    assert extend.schedule.decay_samples == 48


def test_one_step_at_rate_zero_is_the_end_of_a_decay(make_plan: Any, saved_by: Any) -> None:
    """It is not refused, as in any run; two such steps are."""
    for length, refused in ((9, False), (10, True)):
        plan = make_plan(f"{BASE} --train-iters {length}")
        manifest = saved_by("--train-iters 8", 8)
        own = LearningRateSchedule.from_plan(plan)
        extend, keep, _ = schedule_choices(plan, manifest, own)
        assert keep.next_rate == 0
        assert keep.is_zero == refused
        assert not extend.is_zero


def test_a_restart_with_a_long_warm_up(make_plan: Any, saved_by: Any) -> None:
    """The warm-up ends with the run at the latest."""
    manifest = saved_by("--train-iters 8 --lr-warmup-iters 6", 8)
    plan = make_plan(f"{BASE} --train-iters 10 --lr-warmup-iters 6")
    *_, restart = schedule_choices(plan, manifest, LearningRateSchedule.from_plan(plan))
    assert [restart.next_rate, restart.last_rate] == [0.005, 0.01]
