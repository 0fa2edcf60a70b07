"""The learning rate against hand-computed values and a transcript of the reference formulas."""

from __future__ import annotations

import math

import pytest

from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore.optim.schedule import LearningRateSchedule


def schedule(style: str, **changes: float) -> LearningRateSchedule:
    """Return warm-up to 1 over 10 samples, then a decay to 0.2 that ends at sample 50."""
    numbers = {"highest": 1.0, "lowest": 0.2, "warmup_samples": 10, "decay_samples": 50} | changes
    return LearningRateSchedule(style, **numbers)  # type: ignore[arg-type]


WARM = [(0, 0.0), (1, 0.1), (5, 0.5), (10, 1.0)]

# Worked out by hand from section "formulas": r = (n - 10) / 40, 0.2 + 0.8 * kept.
POINTS = {
    "linear": [(20, 0.8), (30, 0.6), (40, 0.4), (50, 0.2), (51, 0.2), (10**9, 0.2)],
    "cosine": [
        (20, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        (30, 0.6),
        (40, 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2),
        (50, 0.2),
        (51, 0.2),
    ],
    "constant": [(11, 1.0), (50, 1.0), (51, 1.0), (10**9, 1.0)],
    # max(min, max * sqrt(w / n)): 10 / 40 is a quarter, whose root is a half; after 50 the lowest.
    "inverse-square-root": [(40, 0.5), (50, math.sqrt(0.2)), (51, 0.2), (1000, 0.2)],
    # Down from sample 40 on (the last fifth of 50): 1 - sqrt(r) with r = (n - 40) / 10.
    "constant-cooldown": [
        (11, 1.0),
        (40, 1.0),
        (42.5, 0.2 + 0.8 * 0.5),
        (49, 0.2 + 0.8 * (1 - math.sqrt(0.9))),
        (50, 0.2),
        (51, 0.2),
    ],
}


@pytest.mark.parametrize("style", POINTS)
def test_hand_computed(style: str) -> None:
    """Each style passes through the values worked out by hand, warm-up included."""
    rate = schedule(style)
    for samples, wanted in WARM + POINTS[style]:
        assert rate(samples) == pytest.approx(wanted, rel=1e-12), samples  # type: ignore[arg-type]


@pytest.mark.parametrize("style", POINTS)
def test_no_warmup(style: str) -> None:
    """Without a warm-up the first step has a rate, and nothing divides by zero."""
    rate = schedule(style, warmup_samples=0)
    assert 0.2 <= rate(1) <= 1.0
    assert rate(0) <= 1.0
    assert rate(50) == pytest.approx({"constant": 1.0, "inverse-square-root": 0.2}.get(style, 0.2))


def test_inverse_square_root_has_a_lowest_rate() -> None:
    """The rate stays at the lowest one also within the decay: sqrt(10 / 250) is 0.2."""
    rate = schedule("inverse-square-root", decay_samples=1000)
    rates = [rate(samples) for samples in (160, 250, 251, 1000)]
    assert rates == pytest.approx([0.25, 0.2, 0.2, 0.2])


def test_decay_as_long_as_the_warmup() -> None:
    """A decay that ends with the warm-up goes from the highest to the lowest rate at once."""
    rate = schedule("cosine", warmup_samples=50)
    assert (rate(50), rate(51)) == (1.0, 0.2)


def test_styles_never_rise_after_the_warmup() -> None:
    """After the warm-up no style goes up, and none leaves the two limits."""
    for style in POINTS:
        rate = schedule(style)
        rates = [rate(n) for n in range(10, 80)]
        assert rates == sorted(rates, reverse=True), style
        assert all(0.2 <= one <= 1.0 for one in rates), style


def test_published_warmup() -> None:
    """The rates that a published log shows at its iterations 25 to 27 come out digit for digit."""
    rate = LearningRateSchedule("cosine", 6e-5, 6e-6, 183_105, 10**8)
    shown = [f"{rate(2 * step):.3E}" for step in (25, 26, 27)]
    assert shown == ["1.638E-08", "1.704E-08", "1.769E-08"]


def plan_schedule(flags: str) -> LearningRateSchedule:
    plan = resolve(
        validate(load_config(flags.split())), tokenizer=TokenizerIdentity(vocab_size=257)
    )
    return LearningRateSchedule.from_plan(plan)


def test_from_steps() -> None:
    """Steps are counted in samples: decay and warm-up times the global batch size."""
    made = plan_schedule(
        "--train-iters 100 --micro-batch-size 2 --global-batch-size 4 --lr 3e-4 --min-lr 3e-5"
        " --lr-warmup-iters 7 --lr-decay-style linear"
    )
    assert made == LearningRateSchedule("linear", 3e-4, 3e-5, 28, 400, 0.2)
    assert plan_schedule("--train-iters 9 --lr-decay-iters 20").decay_samples == 160


def test_from_samples() -> None:
    """A run that counts samples has its decay and warm-up in samples."""
    made = plan_schedule(
        "--train-samples 1001 --micro-batch-size 4 --lr-warmup-samples 33 --lr-decay-samples 900"
    )
    assert (made.warmup_samples, made.decay_samples) == (33, 900)


def test_from_fraction() -> None:
    """A warm-up fraction is of the decay, not of the run."""
    made = plan_schedule("--train-iters 10 --lr-decay-iters 20 --lr-warmup-fraction 0.25")
    assert made.warmup_samples == 40
