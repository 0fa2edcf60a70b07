"""Runs whose batch changes: what they show, equal on several processes, continued on the way."""

from __future__ import annotations

import re
from typing import Any

import pytest

CLOSE = 2e-6
"""Relative: sums of float32 in another order."""

# 2 increments of 24 samples: 4 x 4 samples (to 16), 3 x 8 (to 40), then 12
RAMP = "--rampup-batch-size 4 4 32 --global-batch-size 12 --train-samples 80"
SIZES = [4, 4, 4, 4, 8, 8, 12, 12, 12, 12]


def sizes(run: Any) -> list[int]:
    assert run.status == 0, run.err
    return [row["global_batch_size"] for row in run.rows]


def assert_close(one: Any, two: Any, tolerance: float = CLOSE) -> None:
    """Compare losses, norms and rates of two runs."""
    for found, wanted in zip(one.rows, two.rows, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert found[name] == pytest.approx(wanted[name], rel=tolerance), (name, wanted)


def test_what_a_run_shows(train: Any) -> None:
    """Line, rows, summary and opening lines have the batch of each step and the run's length."""
    run = train("run", f"{RAMP} --lr-warmup-samples 40 --tensorboard")
    assert sizes(run) == SIZES
    assert f"training  {len(SIZES)} steps of 4 to 12 x 16 tokens" in run.err
    assert "warm-up over 40 samples, cosine decay to 0" in run.err
    shown = re.findall(r"iteration +(\d+)/ +10 .*?global batch size: +(\d+) ", run.err)
    assert [(int(step), int(size)) for step, size in shown] == list(enumerate(SIZES, start=1))
    consumed = [sum(SIZES[:at]) for at in range(1, len(SIZES) + 1)]
    assert [row["consumed_samples"] for row in run.rows] == consumed
    assert [row["consumed_tokens"] for row in run.rows] == [16 * count for count in consumed]
    for row in run.rows:
        tokens = 16 * row["global_batch_size"]
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_time_ms"] * 1e3)
    warm = [row["learning_rate"] for row in run.rows if row["consumed_samples"] <= 40]
    assert warm == pytest.approx([2e-3 * count / 40 for count in consumed[: len(warm)]])
    assert run.summary["iteration"] == run.summary["train_iters"] == len(SIZES)
    assert run.err.rstrip().count("ETA: 0:00") >= 1


def test_equal_in_pieces(train: Any, train_once: Any) -> None:
    """Micro-batches of another size give the same losses, at every size of the batch."""
    whole = train_once(f"{RAMP} --micro-batch-size 4")
    parts = train("parts", f"{RAMP} --micro-batch-size 1")
    assert_close(parts, whole)


@pytest.mark.parametrize("cut", [3, 5, 8])
def test_resume_on_the_ramp(train: Any, train_once: Any, assert_same: Any, cut: int) -> None:
    """A run that stops anywhere on the ramp continues as the unbroken one, bit for bit."""
    flags = f"{RAMP} --hidden-dropout 0.1 --eval-interval 4 --eval-iters 1 --split 80,20,0"
    whole = train_once(flags)
    first = train("part", f"{flags} --exit-interval {cut}")
    assert len(first.rows) == cut
    part = train("part", f"{flags} --load {first.directory}")
    assert sizes(part) == SIZES
    assert part.curve() == whole.curve()
    assert [row["step"] for row in part.rows if "valid_loss" in row] == [4, 8, 10]
    assert_same(part.saved(), whole.saved())


def test_in_fp16(train: Any) -> None:
    """Samples of skipped steps count for the ramp, and not for the learning rate."""
    flags = f"{RAMP} --precision fp16 --initial-loss-scale 16777216 --lr-warmup-samples 80"
    run = train("run", flags)
    assert sizes(run) == SIZES
    updates = [row for row in run.rows if "grad_norm" in row]
    assert 0 < len(updates) < len(SIZES)
    seen = [sum(row["global_batch_size"] for row in updates[:n]) for n in range(1, 99)]
    rates = [row["learning_rate"] for row in updates]
    assert rates == pytest.approx([2e-3 * count / 80 for count in seen[: len(rates)]])


@pytest.mark.distributed
def test_on_several_processes(train: Any, train_once: Any, start: Any, finish: Any) -> None:
    """Two processes take the steps of one, and one continues where two stopped on the ramp."""
    alone = train_once(f"{RAMP} --micro-batch-size 4")
    both = f"{RAMP} --micro-batch-size 2 --nproc-per-node 2"
    together = finish(start("together", both), "together")
    assert sizes(together) == SIZES
    assert_close(together, alone)
    first = finish(start("part", f"{both} --exit-interval 5"), "part")
    assert first.status == 0, first.err
    part = train("part", f"{RAMP} --micro-batch-size 4 --load {first.directory}")
    assert sizes(part) == SIZES
    assert_close(part, alone, tolerance=10 * CLOSE)


@pytest.mark.distributed
def test_a_size_that_does_not_divide(start: Any, finish: Any) -> None:
    """The launcher refuses a ramp with a size that the processes cannot share."""
    run = finish(start("run", f"{RAMP} --nproc-per-node 3"), "run")
    assert run.status == 2
    assert "has sizes that 12 does not divide, such as 4" in run.err
    assert "hint: use `--rampup-batch-size 12 12 32`" in run.err


def test_a_run_that_ends_on_its_ramp(train: Any, train_once: Any, assert_same: Any) -> None:
    """Its 50 steps have 2 samples; it continues near its end, where no rate is 0 but the last."""
    flags = "--rampup-batch-size 2 2 1000 --global-batch-size 16 --train-samples 100"
    flags += " --micro-batch-size 2"
    whole = train_once(flags)
    assert sizes(whole) == [2] * 50
    assert "training  50 steps of 2 x 16 tokens" in whole.err
    assert "learning rate 0:" not in whole.err
    assert [row["step"] for row in whole.rows if row["learning_rate"] == 0] == [50]
    first = train("part", f"{flags} --exit-interval 44")
    part = train("part", f"{flags} --load {first.directory}")
    assert part.status == 0, part.err
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())
    again = train("part", f"{flags} --load {part.directory}")
    assert f"`lmcore train --continue {part.directory} --train-samples N` trains" in again.out


# 4 x 4 samples until 256 tokens (16 samples) are seen, 3 x 8 until 640, then 12
SCHEDULE = "--step-batch-size-schedule 0:4,256:8 640:12 --train-samples 80"
SCHEDULED = [4, 4, 4, 4, 8, 8, 8, 12, 12, 12]


@pytest.mark.parametrize("cut", [2, 4, 6])
def test_resume_on_a_schedule(train: Any, train_once: Any, assert_same: Any, cut: int) -> None:
    """A run continues at any step of its schedule as the unbroken one, bit for bit."""
    flags = f"{SCHEDULE} --hidden-dropout 0.1 --eval-interval 4 --eval-iters 1 --split 80,20,0"
    whole = train_once(flags)
    assert sizes(whole) == SCHEDULED
    assert "training  10 steps of 4 to 12 x 16 tokens" in whole.err
    first = train("part", f"{flags} --exit-interval {cut}")
    part = train("part", f"{flags} --load {first.directory}")
    assert sizes(part) == SCHEDULED
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())


def test_a_changed_schedule(train: Any, train_once: Any) -> None:
    """Another schedule whose steps do not fit is refused, with the first run's flag."""
    first = train_once(f"{SCHEDULE} --exit-interval 4")
    run = train("other", f"{SCHEDULE.replace('0:4,256', '0')} --load {first.directory}")
    assert run.status == 2
    assert "the batch sizes are not the checkpoint's" in run.err
    assert "give the first run's `--step-batch-size-schedule 0:4,256:8 640:12`" in run.err


@pytest.mark.distributed
def test_a_schedule_on_several_processes(train_once: Any, start: Any, finish: Any) -> None:
    """Two processes take the steps of one."""
    alone = train_once(f"{SCHEDULE} --micro-batch-size 4")
    run = finish(start("two", f"{SCHEDULE} --micro-batch-size 2 --nproc-per-node 2"), "two")
    assert sizes(run) == SCHEDULED
    assert_close(run, alone)
