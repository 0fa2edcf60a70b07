"""Runs in fp16: their losses, the loss scale of the reference, skipped steps, continuing."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

HALF = 5e-3
"""Relative: losses of about 5 in products of ten bits."""

EXTRA = ("loss_scale", "skipped_iterations")

SCRIPT = str(Path(__file__).with_name("spoiled_gradient.py"))


def curve(run: Any) -> list[tuple[Any, ...]]:
    """Return what two equal runs share, the loss scale and skipped steps included."""
    assert run.status == 0, run.err
    more = [tuple(row[name] for name in EXTRA) for row in run.rows]
    return [one + two for one, two in zip(run.curve(), more, strict=True)]


def test_losses(train: Any) -> None:
    """Without an overflow the losses match fp32 to half precision, and not its bits."""
    flags = "--train-iters 8 --global-batch-size 8"
    full = train("fp32", flags)
    half = train("fp16", f"{flags} --precision fp16 --initial-loss-scale 1024")
    assert half.status == 0, half.err
    assert "precision fp16: products in float16 (autocast)" in half.err
    assert half.summary["skipped_iterations"] == 0
    found, wanted = ([row["loss"] for row in run.rows] for run in (half, full))
    assert found == pytest.approx(wanted, rel=HALF)
    assert found != wanted
    norms = ([row["grad_norm"] for row in run.rows] for run in (half, full))
    assert next(norms) == pytest.approx(next(norms), rel=HALF)
    fixed = train("fixed", f"{flags} --fp16 --loss-scale 1024")
    assert fixed.curve() == half.curve()


def test_the_first_steps(train: Any) -> None:
    """From 2^32 on steps are skipped: the rate is frozen, samples are consumed, the line says so.

    The scale reads 2^32, 2^31, 2^30, as in the reference's published log.
    """
    run = train("run", "--train-iters 24 --precision fp16 --lr-warmup-iters 24")
    assert run.status == 0, run.err
    rows = run.rows
    skipped = [row for row in rows if "grad_norm" not in row]
    assert [row["loss_scale"] for row in rows[:3]] == [2.0**32, 2.0**31, 2.0**30]
    assert [row["learning_rate"] for row in rows[:3]] == [0.0, 0.0, 0.0]
    assert [row["consumed_samples"] for row in rows] == [4 * step for step in range(1, 25)]
    assert all(math.isfinite(row["loss"]) for row in skipped)
    assert run.summary["skipped_iterations"] == len(skipped) == rows[-1]["skipped_iterations"]
    assert 3 < len(skipped) < 20
    updates = [row["learning_rate"] for row in rows if "grad_norm" in row]
    assert updates == pytest.approx([2e-3 * step / 24 for step in range(1, len(updates) + 1)])
    lines = re.findall(r"iteration +\d+/.*", run.err)
    assert "| loss scale: 4294967296.0 | number of skipped iterations:   1 |" in lines[0]
    assert "lm loss" not in lines[0]
    assert "number of skipped iterations:   0 |" in lines[-1]


def test_growth(train: Any) -> None:
    """The scale doubles after the window; the hysteresis is then full again."""
    flags = "--precision fp16 --initial-loss-scale 64 --loss-scale-window 3"
    run = train("run", f"--train-iters 7 {flags}")
    assert [row["loss_scale"] for row in run.rows] == [64, 64, 128, 128, 128, 256, 256]


@pytest.mark.parametrize("cut", [2, 14, 17])
def test_resume(train: Any, train_once: Any, assert_same: Any, cut: int) -> None:
    """A run in two parts is the run in one, bit for bit: scale, counts, rates, weights."""
    flags = (
        "--train-iters 22 --precision fp16 --loss-scale-window 4 --hidden-dropout 0.1"
        " --lr-warmup-iters 5 --eval-interval 11 --eval-iters 1 --split 80,20,0"
    )
    whole = train_once(flags)
    first = train("part", f"{flags} --exit-interval {cut}")
    assert first.status == 0, first.err
    part = train("part", f"{flags} --load {first.directory}")
    assert curve(part) == curve(whole)
    assert len({row["loss_scale"] for row in part.rows}) > 8
    assert_same(part.saved(), whole.saved())


def test_from_another_precision(train: Any) -> None:
    """A run that continues in fp16 begins with a new scale; in fp32 there is none."""
    flags = "--train-iters 9 --initial-loss-scale 128"
    first = train("run", f"{flags} --exit-interval 3")
    assert "ignored: `--initial-loss-scale 128.0` (needs a precision" in first.err
    load = f"{flags} --load {first.directory}"
    half = train("run", f"{load} --precision fp16 --exit-interval 6")
    assert half.status == 0, half.err
    last = train("run", load)
    assert [row["loss_scale"] for row in last.rows] == [1.0] * 3 + [128.0] * 3 + [1.0] * 3


@pytest.fixture
def spoiled(as_ranks: Any) -> Any:
    """Trains in as many processes as there are words, whose gradients overflow at those steps."""

    def go(name: str, flags: str, *steps: str) -> Any:
        return as_ranks(name, flags, [[SCRIPT, bad] for bad in steps])

    return go


def test_no_scale_helps(spoiled: Any, tmp_path: Path) -> None:
    """A run whose gradients overflow at the lowest scale ends with an error; nothing is saved."""
    flags = "--train-iters 9 --precision fp16 --initial-loss-scale 4"
    run = spoiled("run", flags, "2,3,4,5,6")
    assert run.status == 1
    assert re.search("error: the gradient norm is (inf|nan) at step 5", run.err)
    assert "the loss is finite, its gradients are not" in run.err
    assert "the loss scale is at its lowest, 1 (`--min-loss-scale`)" in run.err
    assert [row["loss_scale"] for row in run.rows] == [4, 4, 2, 1]
    assert not list((tmp_path / "run/checkpoints").glob("iter_*"))


@pytest.mark.distributed
def test_two_processes(train: Any, start: Any, finish: Any) -> None:
    """Scale and rates match one process, losses to half precision; resume is exact."""
    flags = "--train-iters 12 --precision fp16 --global-batch-size 8"
    flags += " --loss-scale-window 5 --initial-loss-scale 256"
    alone = train("alone", f"{flags} --micro-batch-size 8")
    both = f"{flags} --micro-batch-size 4 --nproc-per-node 2"
    together = finish(start("together", both), "together")
    for name in ("learning_rate", *EXTRA):
        assert [row[name] for row in together.rows] == [row[name] for row in alone.rows]
    for name in ("loss", "grad_norm"):
        wanted = [row[name] for row in alone.rows]
        assert [row[name] for row in together.rows] == pytest.approx(wanted, rel=HALF)
    assert [row["loss_scale"] for row in together.rows] == [256] * 4 + [512] * 5 + [1024] * 3
    first = finish(start("part", f"{both} --exit-interval 7"), "part")
    assert first.status == 0, first.err
    part = finish(start("part", f"{both} --load {first.directory}"), "part")
    assert curve(part) == curve(together)


@pytest.mark.distributed
def test_one_process_overflows(spoiled: Any, assert_same: Any) -> None:
    """An overflow in one process alone is every one's: all skip the step, and continue alike."""
    flags = "--train-iters 9 --global-batch-size 8 --loss-scale-window 3 --precision fp16"
    flags += " --initial-loss-scale 256"
    first = spoiled("first", flags, "2,3,6", "-")
    second = spoiled("second", flags, "-", "2,3,6")
    both = spoiled("both", flags, "2,3,6", "2,3,6")
    assert curve(first) == curve(second) == curve(both)
    assert [row["loss_scale"] for row in first.rows] == [256] * 2 + [128] * 3 + [64] * 3 + [128]
    assert [row["step"] for row in first.rows if "grad_norm" not in row] == [2, 3, 6]
    assert_same(first.saved(), second.saved())
    assert_same(first.saved(), both.saved())
