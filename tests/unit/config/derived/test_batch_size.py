"""Batches that grow, against published runs and a step-by-step count."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError
from lmcore.config.derived.batch_size import BatchSizes, read_schedule
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


def test_a_schedule_in_tokens() -> None:
    """Megatron's example with samples of 2048 tokens, whose thresholds are rounded down."""
    steps = read_schedule(["0:768 250B:1536 500B:3072 750B:6144"], 2048)
    assert steps == ((0, 768), (122_070_312, 1536), (244_140_625, 3072), (366_210_937, 6144))
    sizes = BatchSizes.of(0, (), steps)
    assert [sizes.at(n) for n in (0, 122_070_311, 122_070_312)] == [768, 768, 1536]
    assert [sizes.at(n) for n in (366_210_936, 366_210_937, 10**12)] == [3072, 6144, 6144]
    # 158,946 steps of 768 end at 122,070,528, the first number of samples above the threshold
    assert sizes.steps(122_070_528) == 158_946
    assert sizes.steps(122_070_528 + 1535) == 158_946
    assert sizes.steps(122_070_528 + 1536) == 158_947
    assert sizes.samples(158_947) == 122_070_528 + 1536
    assert sizes.samples(2, 122_070_528 - 768) == 768 + 1536


@pytest.mark.parametrize(
    "words, steps",
    [
        (["0:2,1.5k:4"], ((0, 2), (93, 4))),
        (["0:1K", "1M:2k"], ((0, 1000), (62_500, 2000))),
        (["32:8 0:2 16:4"], ((0, 2), (1, 4), (2, 8))),
        (["0:2 1e3:4 1T:8"], ((0, 2), (62, 4), (62_500_000_000, 8))),
    ],
)
def test_forms_of_a_schedule(words: list[str], steps: tuple[tuple[int, int], ...]) -> None:
    """Blanks or commas part the steps, which may come in any order; numbers have suffixes."""
    assert read_schedule(words, 16) == steps


@pytest.mark.parametrize(
    "word, what",
    [
        ("0:2 x:4", "`x:4` is no step of a batch size schedule"),
        ("0:2 16", "`16` is no step of a batch size schedule"),
        ("0:0", "`0:0` is no step of a batch size schedule"),
        ("0:2 -16:4", "`-16:4` is no step of a batch size schedule"),
        (",", "the batch size schedule has no size for the first step"),
        ("16:2", "the batch size schedule has no size for the first step"),
        ("0:2 320:4 335:8", "the batch size schedule has several sizes from sample 20 on"),
    ],
)
def test_a_schedule_that_is_none(word: str, what: str) -> None:
    """Wrong steps are named."""
    with pytest.raises(ConfigError) as caught:
        read_schedule([word], 16)
    assert caught.value.what == what


@given(
    gaps=st.lists(st.integers(1, 60), min_size=0, max_size=5),
    first=st.integers(1, 12),
    data=st.data(),
    total=st.integers(0, 400),
)
def test_a_schedule_as_counted_one_by_one(
    gaps: list[int], first: int, data: st.DataObject, total: int
) -> None:
    """Sizes, steps and samples match a count that takes one step after the other."""
    starts = [sum(gaps[:n]) for n in range(len(gaps) + 1)]
    steps = tuple((start, data.draw(st.integers(1, 12)) if start else first) for start in starts)
    sizes, consumed, taken = BatchSizes.of(0, (), steps), 0, [0]
    while True:
        size = [size for start, size in steps if start <= consumed][-1]
        assert sizes.at(consumed) == size
        if consumed + size > total:
            break
        consumed += size
        taken.append(consumed)
    assert sizes.steps(total) == len(taken) - 1
    at = data.draw(st.integers(0, len(taken) - 1))
    assert sizes.samples(len(taken) - 1 - at, taken[at]) == consumed - taken[at]


def test_the_plan_of_a_schedule() -> None:
    """The last size is the global batch size, and the run's file repeats the schedule."""
    plan = plan_of(
        "--train-samples 100 --step-batch-size-schedule 0:2,320:4 480:8 --micro-batch-size 2 "
        "--seq-length 16 --eval-iters 10 --eval-interval 5"
    )
    assert (plan.global_batch_size, plan.train_iters) == (8, 10 + 3 + 8)
    assert plan.valid_samples == (21 // 5 + 1) * 10 * 8
    assert '  step_batch_size_schedule: ["0:2,320:4", "480:8"]' in write_run_file(plan)


@pytest.mark.parametrize(
    "line, world_size, what, hint",
    [
        ("0:2 320:6", 1, "has sizes that 4 does not divide, such as 2", "0:4 320:8"),
        ("0:8 320:12", 2, "has sizes that 8 does not divide, such as 12", "0:8 320:16"),
    ],
)
def test_scheduled_sizes_that_do_not_divide(
    line: str, world_size: int, what: str, hint: str
) -> None:
    """Every size must divide among the processes, and near sizes that do are named."""
    flags = ["--train-samples", "2000", "--micro-batch-size", "4", "--seq-length", "16"]
    loaded = load_config([*flags, "--step-batch-size-schedule", line])
    (found,) = problems_of(loaded, world_size=world_size)
    assert what in found.what
    assert str(found.hint).startswith(f"use `--step-batch-size-schedule {hint}`")


@pytest.mark.parametrize(
    "more, what",
    [
        ("--rampup-batch-size 2 2 8 --global-batch-size 8", "exclude each other"),
        ("--global-batch-size 16", "does not end with `--global-batch-size 16`"),
        ("--train-iters 5", "needs `--train-samples`"),
    ],
)
def test_a_schedule_beside_other_sizes(more: str, what: str) -> None:
    """A ramp, another last size and a length in steps are refused."""
    line = f"--micro-batch-size 2 --step-batch-size-schedule 0:2 320:8 {more}"
    line += "" if "--train-iters" in more else " --train-samples 2000"
    found = [one.what for one in problems_of(load_config(line.split()), world_size=1)]
    assert any(what in one for one in found), found


def test_a_pipeline_with_a_schedule() -> None:
    """The smallest size must give every stage a micro-batch, wherever it is in the schedule."""
    line = "--train-samples 2000 --micro-batch-size 2 --pipeline-model-parallel-size 2 "
    good = load_config([*line.split(), "--step-batch-size-schedule", "0:8 3200:4"])
    assert problems_of(good, world_size=2) == []
    bad = load_config([*line.split(), "--step-batch-size-schedule", "0:8 3200:2"])
    (found,) = problems_of(bad, world_size=2)
    assert found.what == "1 micro-batch is fewer than the pipeline's 2 processes"
