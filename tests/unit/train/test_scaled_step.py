"""A step with a loss scale: exact, skipped on overflow, and an error where no scale helps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lmcore.data.loading.loader import BatchLoader
from lmcore.optim.loss_scale import DynamicLossScale, FixedLossScale
from lmcore.train.diagnose.non_finite import NonFiniteError
from lmcore.train.step import TrainStep


@pytest.fixture
def steps(make_plan: Any, make_state: Any, make_datasets: Any, runtime: Any) -> Any:
    """Takes steps with a loss scale; the steps in *bad* (from 1) get infinite gradients."""

    def take(
        flags: str, count: int, scale: Any = None, bad: tuple[int, ...] = (), change: Any = None
    ) -> Any:
        plan = make_plan(flags)
        state = make_state(plan)
        if scale is not None:
            state.loss_scale = scale
        state.model.final_norm.bias.register_hook(
            lambda grad: grad * (math.inf if state.iteration + 1 in bad else 1.0)
        )
        step = TrainStep(state, plan, runtime)
        if change is not None:
            change(state)
        micro = plan.config.training.micro_batch_size
        with BatchLoader(make_datasets(plan).train, micro_batch_size=micro) as batches:
            return state, [step(batches).result() for _ in range(count)]

    return take


@pytest.mark.parametrize("clip", [0, 0.25])
@pytest.mark.parametrize("exponent", [16, 40, -20])
def test_a_power_of_two_changes_nothing(
    steps: Any, weights: Any, clip: float, exponent: int
) -> None:
    """Loss, norm and weights in float32 are those without a scale, bit for bit."""
    flags = f"--global-batch-size 8 --micro-batch-size 2 --clip-grad {clip}"
    plain, wanted = steps(flags, 3)
    scaled, found = steps(flags, 3, FixedLossScale(2.0**exponent))
    for one, other in zip(found, wanted, strict=True):
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    before = weights(plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(scaled).items())


def test_any_scale_is_divided_out(steps: Any) -> None:
    """With a scale that is no power of two, loss and norm are right to rounding."""
    _, wanted = steps("", 3)
    _, found = steps("", 3, FixedLossScale(1000.0))
    for one, other in zip(found, wanted, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_a_skipped_step(steps: Any, weights: Any) -> None:
    """An overflow updates nothing; the samples are consumed, and the true loss is reported."""
    state, results = steps("", 2, DynamicLossScale(2.0**16), bad=(2,))
    alone, _ = steps("", 1, DynamicLossScale(2.0**16))
    before = weights(alone)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(state).items())
    skipped = results[1]
    assert (skipped.skipped, skipped.grad_norm) == (True, None)
    assert skipped.loss is not None
    assert state.counters() == {
        "iteration": 2,
        "consumed_samples": 8,
        "consumed_tokens": 8 * 16,
        "scheduled_samples": 4,
        "skipped_iterations": 1,
    }


def test_scale_and_rate_over_skipped_steps(steps: Any) -> None:
    """The scale reads 2^32, 2^31, 2^30; the rate stays and continues from there."""
    flags = "--lr 1e-2 --lr-warmup-iters 8 --lr-decay-style constant"
    _, results = steps(flags, 6, DynamicLossScale(), bad=(1, 2, 3, 5))
    assert [one.loss_scale for one in results] == [
        *(2.0**32, 2.0**31, 2.0**30),
        *(2.0**30, 2.0**29, 2.0**29),
    ]
    assert [one.learning_rate for one in results] == pytest.approx(
        [0.0, 0.0, 0.0, 0.00125, 0.00125, 0.0025]
    )
    assert [one.skipped for one in results] == [True, True, True, False, True, False]


def test_training_goes_on_as_if_the_batch_had_not_been(steps: Any, weights: Any) -> None:
    """Moments, their counts and the schedule know nothing of a skipped step."""
    flags = "--lr-warmup-iters 4"
    state, _ = steps(flags, 1, DynamicLossScale(64.0), bad=(1,))
    fresh = weights(state)
    assert all(float(tensor) == 0.0 for name, tensor in fresh.items() if "optimizer.step" in name)
    state, _ = steps(flags, 4, DynamicLossScale(64.0), bad=(1, 3))
    counts = [tensor for name, tensor in weights(state).items() if "optimizer.step" in name]
    assert counts
    assert all(float(tensor) == 2.0 for tensor in counts)
    assert (state.scheduled_samples, state.consumed_samples) == (8, 16)


def test_another_process_overflows(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that only another process cannot take is skipped here too."""
    monkeypatch.setattr(
        "lmcore.train.step.all_reduce_scalars_on_device",
        lambda _, loss, square, *more: torch.tensor([loss, math.inf, *more]),
    )
    state, (result,) = steps("", 1, DynamicLossScale(64.0))
    assert result.skipped
    assert state.skipped_iterations == 1
    with pytest.raises(NonFiniteError, match="gradient norm of another process is not finite"):
        steps("", 1)


def test_a_loss_that_is_not_finite(steps: Any) -> None:
    """It is skipped like an overflow, as float16 may overflow on the way forward too."""

    def spoil(state: Any) -> None:
        real, calls = state.model.loss, iter(range(99))
        state.model.loss = lambda **batch: real(**batch) * (math.nan if next(calls) == 1 else 1.0)

    state, results = steps("", 3, DynamicLossScale(64.0), change=spoil)
    assert [one.skipped for one in results] == [False, True, False]
    assert results[1].loss is None
    assert state.skipped_iterations == 1


def test_no_scale_helps(steps: Any) -> None:
    """An overflow at the lowest scale is an error that says so; nothing was updated."""
    scale = DynamicLossScale(4.0, minimum=2.0, hysteresis=1)
    with pytest.raises(NonFiniteError, match="the gradient norm is inf at step 3") as caught:
        steps("", 4, scale, bad=(2, 3))
    why = str(caught.value.why)
    assert "`final_norm.bias`" in why
    assert "the loss scale is at its lowest, 2 (`--min-loss-scale`)" in why
    assert "nothing was updated" in why


def test_a_fixed_scale_gives_up(steps: Any) -> None:
    """So many skipped steps in a row end a run with a fixed scale."""
    steps("", 4, FixedLossScale(8.0, patience=2), bad=(1, 2, 4))
    with pytest.raises(NonFiniteError) as caught:
        steps("", 4, FixedLossScale(8.0, patience=2), bad=(1, 2, 3))
    assert "`--loss-scale 8`" in str(caught.value.why)


def test_growing_batches(steps: Any) -> None:
    """Steps take the samples of the ramp, each loss a mean over its own micro-batches."""
    flags = "--train-samples 96 --rampup-batch-size 4 4 24 --global-batch-size 12 --clip-grad 0"
    state, results = steps(f"{flags} --micro-batch-size 2", 6)
    assert [one.global_batch_size for one in results] == [4, 4, 4, 8, 8, 12]
    assert state.consumed_samples == state.scheduled_samples == 40
    assert state.consumed_tokens == 40 * 16
    _, whole = steps(f"{flags} --micro-batch-size 4", 6)
    for one, other in zip(results, whole, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        assert one.learning_rate == other.learning_rate
