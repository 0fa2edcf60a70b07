"""Batches that grow, against published runs and a step-by-step count."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.config.derived.batch_size import BatchSizes
from lmcore.config.file.run_file import write_run_file
from lmcore.config.load import load_config
from lmcore.config.resolve import RunPlan, resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import problems_of, validate

PUBLISHED = BatchSizes.of(1536, (16, 16, 5_859_375))


def plan_of(line: str, *, world_size: int = 1) -> RunPlan:
    return resolve(
        validate(load_config(line.split()), world_size=world_size),
        tokenizer=TokenizerIdentity(vocab_size=257),
    )


def test_published_ramp() -> None:
    """From 16 to 1536 over 5,859,375 samples: 95 sizes, 19,802 steps, 111,354 in all."""
    assert PUBLISHED.at(PUBLISHED.samples(19_801)) == 1520
    assert PUBLISHED.at(PUBLISHED.samples(19_802)) == 1536
    assert PUBLISHED.steps(146_484_375) == 111_354
    # 95 equal shares of 61,677.63 samples: the second begins with sample 61,678
    assert [PUBLISHED.at(n) for n in (0, 61_677, 61_678, 123_355, 123_356)] == [16, 16, 32, 32, 48]
    assert [PUBLISHED.at(n) for n in (5_797_697, 5_797_698, 5_859_374)] == [1504, 1520, 1520]
    assert [PUBLISHED.at(n) for n in (5_859_375, 10**9)] == [1536, 1536]


def test_a_run_within_its_ramp() -> None:
    """100 samples of a ramp of 1000 from 2 by 2 are 50 steps of 2."""
    sizes = BatchSizes.of(16, (2, 2, 1000))
    assert sizes.steps(100) == 50
    assert sizes.steps(1) == 0
    assert sizes.samples(50) == 100


def test_no_ramp() -> None:
    """Without one every step is alike, and an incomplete last one is left out."""
    sizes = BatchSizes.of(8)
    assert [sizes.at(n) for n in (0, 8, 10**9)] == [8, 8, 8]
    assert (sizes.steps(23), sizes.samples(3, 5)) == (2, 24)


@given(
    start=st.integers(1, 12),
    increment=st.integers(1, 12),
    count=st.integers(1, 40),
    samples=st.integers(1, 3000),
    total=st.integers(0, 6000),
    data=st.data(),
)
def test_as_counted_one_by_one(
    start: int, increment: int, count: int, samples: int, total: int, data: st.DataObject
) -> None:
    """Sizes, steps and samples match a count that takes one step after the other."""
    sizes = BatchSizes.of(start + count * increment, (start, increment, samples))
    consumed, taken = 0, [0]
    while True:
        share = Fraction(samples, count)
        size = start + min(int(consumed / share), count) * increment
        assert sizes.at(consumed) == size
        if consumed + size > total:
            break
        consumed += size
        taken.append(consumed)
    steps = len(taken) - 1
    assert sizes.steps(total) == steps
    at = data.draw(st.integers(0, steps))
    assert sizes.samples(steps - at, taken[at]) == consumed - taken[at]


def test_the_plan_of_a_published_run() -> None:
    """Steps, validation targets and schedule of a ramp follow from the samples."""
    plan = plan_of(
        "--train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 "
        "--global-batch-size 1536 --rampup-batch-size 16 16 5859375 --micro-batch-size 4 "
        "--eval-iters 10 --eval-interval 1000",
        world_size=4,
    )
    assert (plan.train_iters, plan.train_samples) == (111_354, 146_484_375)
    assert plan.valid_samples == (111_354 // 1000 + 1) * 10 * 1536
    assert (plan.lr_decay_samples, plan.lr_warmup_samples) == (126_953_125, 183_105)
    assert plan.num_micro_batches == 96
    assert plan.batch_sizes == PUBLISHED


def test_a_plan_reads_back() -> None:
    """The file of a run with a ramp and loss-scale settings gives the same plan again."""
    plan = plan_of(
        "--train-samples 100 --rampup-batch-size 2 2 50 --global-batch-size 8 "
        "--micro-batch-size 2 --precision fp16 --loss-scale 4096"
    )
    lines = write_run_file(plan)
    assert "rampup_batch_size: [2, 2, 50]" in lines
    assert "loss_scale: 4096.0" in lines


@pytest.mark.parametrize(
    "line, world_size, what, hint",
    [
        (
            "--rampup-batch-size 16 24 1000 --global-batch-size 64 --micro-batch-size 16",
            1,
            "has sizes that 16 does not divide, such as 40",
            "use `--rampup-batch-size 16 32 1000`",
        ),
        (
            "--rampup-batch-size 4 4 1000 --global-batch-size 64 --micro-batch-size 4",
            2,
            "has sizes that 8 does not divide, such as 4",
            "use `--rampup-batch-size 8 8 1000`",
        ),
    ],
)
def test_sizes_that_do_not_divide(line: str, world_size: int, what: str, hint: str) -> None:
    """Every size of the ramp must divide among the processes, and near sizes that do are named."""
    loaded = load_config([*line.split(), "--train-samples", "2000"])
    problems = problems_of(loaded, world_size=world_size)
    (found,) = [one for one in problems if "that" in one.what]
    assert what in found.what
    assert str(found.hint).startswith(hint)


def test_sound_ramps() -> None:
    """A ramp may be longer than the run, and its first size may be all that the run takes."""
    for line in (
        "--rampup-batch-size 8 8 1000 --global-batch-size 64 --train-samples 8",
        "--rampup-batch-size 8 56 3 --global-batch-size 64 --train-samples 800",
    ):
        assert problems_of(load_config(line.split()), world_size=1) == []
