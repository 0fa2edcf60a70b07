"""Mean over the valid targets of a global batch: the divisor, and batches without any target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from step_gradients import StepGradients

from lmcore.base.errors import DataError
from lmcore.data.loading.batch import Batch
from lmcore.families.bert.family import BERT
from lmcore.families.gpt.family import GPT
from lmcore.model.family import families, family_of
from lmcore.train.step import TrainStep
from lmcore.train.token_mean import TokenMean, may_mask_targets

CPU = torch.device("cpu")
MEANS = "--no-calculate-per-token-loss"


def named(*tensors: torch.Tensor) -> Batch:
    """Return tokens, targets and weights as a micro-batch."""
    return dict(zip(("tokens_BS", "targets_BS", "loss_weight_BS"), tensors, strict=True))


def batches(*valid: int, seed: int = 0) -> Iterator[Batch]:
    """Yield micro-batches of 16 tokens with these numbers of valid targets."""
    generator = torch.Generator().manual_seed(seed)
    for number in valid:
        tokens = torch.randint(257, (1, 17), generator=generator)
        weights = torch.zeros(1, 16)
        weights[:, :number] = 1
        yield named(tokens[:, :-1], tokens[:, 1:], weights)


def whole(parts: Iterator[Batch]) -> Batch:
    """Return micro-batches as one."""
    tensors = list(parts)
    return {name: torch.cat([one[name] for one in tensors]) for name in tensors[0]}


@pytest.fixture
def take(make_plan: Any, make_state: Any, runtime: Any) -> Any:
    """Takes a step with micro-batches, and returns the result and the gradients."""

    def go(flags: str, parts: Iterator[Batch]) -> Any:
        plan = make_plan(f"--global-batch-size 4 {flags}")
        state = make_state(plan)
        kept = StepGradients(state)
        result = TrainStep(state, plan, runtime)(parts).result()
        return result, kept.of_step()

    return go


@pytest.mark.parametrize("clip", ["0", "0.5"])
@pytest.mark.parametrize("valid", [(16, 16, 16, 16), (16, 3, 0, 9), (0, 0, 0, 1)])
def test_size_of_micro_batches_does_not_count(take: Any, valid: Any, clip: str) -> None:
    """One by one and at once: the same loss, norm and gradients, also if some have no target."""
    flags = f"--clip-grad {clip}"
    one, at_once = take(f"{flags} --micro-batch-size 4", iter([whole(batches(*valid))]))
    other, parts = take(f"{flags} --micro-batch-size 1", batches(*valid))
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for name, gradient in at_once.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-7)


def test_without_masks_both_means_are_bitwise_equal(take: Any) -> None:
    """No factor but 1 is applied if all targets are valid."""
    found = [
        take(f"--micro-batch-size 1 --clip-grad 0.5 {flags}", batches(16, 16, 16, 16))
        for flags in ("", MEANS)
    ]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())


@pytest.mark.parametrize("flags", ["", MEANS])
def test_no_valid_target(make_plan: Any, make_state: Any, runtime: Any, flags: str) -> None:
    """It is an error that names the step and its samples, before anything is updated."""
    plan = make_plan(f"--global-batch-size 4 --micro-batch-size 1 {flags}")
    state = make_state(plan)
    step = TrainStep(state, plan, runtime)
    step(batches(16, 0, 0, 0)).result()
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    with pytest.raises(DataError, match="no target counts in the loss of step 2, samples 4 to 7"):
        step(batches(0, 0, 0, 0))
    assert (state.iteration, state.consumed_samples) == (1, 4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


def counted(plan: Any, *valid: int) -> TokenMean:
    mean = TokenMean(plan, GPT, CPU)
    for batch in batches(*valid):
        mean.count(batch)
    return mean


@pytest.mark.parametrize("valid,divisor", [((16, 16), 1.0), ((16, 0), 0.5), ((3, 1), 0.125)])
def test_divisor(make_plan: Any, valid: Any, divisor: float) -> None:
    """It is the share of valid targets over all ranks, on the host and on the device; else 1."""
    mean = counted(make_plan(""), *valid)
    own = [float(one) for one in mean.excluded]
    others = 16.0 * 2 * 3  # three other ranks without a valid target
    assert mean.divisors([own[0] + others], 4) == [divisor / 4]
    assert mean.divisors(own, 1) == [divisor]
    on_device = mean.divisor_on_device(torch.tensor(own), 1)
    assert on_device is not None
    assert on_device.item() == divisor
    means = counted(make_plan(MEANS), *valid)
    assert means.divisors(own, 1) == [1.0]
    assert means.divisor_on_device(torch.tensor(own), 1) is None


def test_many_targets(make_plan: Any) -> None:
    """No target is found although the number of masked ones is rounded, and few are found."""
    mean = TokenMean(make_plan(""), GPT, CPU)
    ones = torch.ones(1, 10_000_019)
    mean.count(named(ones, ones, torch.zeros_like(ones)))
    positions = ones.numel() * 7
    rounded = torch.tensor(float(positions), dtype=torch.float32).item()
    assert rounded != positions
    assert not mean.has_targets([rounded], 7)
    assert mean.has_targets([rounded - 100], 7)
    few = counted(make_plan(""), 1, 0)
    assert few.has_targets([31.0], 1)
    assert not few.has_targets([32.0], 1)


def test_whether_targets_may_be_masked(make_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the setting, or by the samples of a family."""
    assert not may_mask_targets(make_plan(""))
    assert may_mask_targets(make_plan("--eod-mask-loss"))
    masked = dataclasses.replace(families()["GPT"], every_position_is_a_target=False)
    monkeypatch.setitem(families(), "GPT", masked)
    assert may_mask_targets(make_plan(""))


def test_fillers_of_a_validation(make_plan: Any) -> None:
    """A micro-batch of samples that only fill up a task's validation does not count in its mean."""
    plan = make_plan(MEANS)
    shape = dataclasses.replace(plan.shape, task="classification", num_labels=2)
    plan = dataclasses.replace(plan, shape=shape)
    mean = TokenMean(plan, family_of(shape), CPU)
    total = 0.0
    for weight in (1.0, 1.0, 0.0, 0.0):
        batch = mean.batch(mean.count({"label_weight_Q": torch.full((2,), weight)}))
        total += float((batch["label_weight_Q"] * 3.0).sum())
    assert total / 4 / mean.divisors([float(one) for one in mean.excluded], 1)[0] == 3.0
    assert not may_mask_targets(plan)


@pytest.mark.parametrize("share", [1.0, 65536.0])
def test_one_of_several_losses_without_targets(make_plan: Any, runtime: Any, share: float) -> None:
    """It is 0 whatever the loss scale is, and the other one as without it."""
    mean = TokenMean(make_plan(""), BERT, CPU)
    batch = {"loss_weight_BM": torch.zeros(2, 4), "order_weight_B": torch.ones(2)}
    (taken,) = mean.take(iter([batch]), 1, runtime)
    found = mean.batch(taken, share=share)
    assert found["loss_weight_BM"].tolist() == [[0.0] * 4] * 2
    assert found["order_weight_B"].tolist() == [share / 2] * 2


@pytest.mark.parametrize("mean", ["", MEANS])
def test_weights_that_are_no_counts(take: Any, mean: str) -> None:
    """Targets may weigh more or less than 1: the mean is divided by the sum of all weights."""
    halves = [one | {"loss_weight_BS": one["loss_weight_BS"] * 0.5} for one in batches(8, 4, 1, 0)]
    flags = f"--micro-batch-size 1 --clip-grad 0 {mean}"
    one, gradients = take(flags, iter(halves))
    other, wanted = take(flags, batches(8, 4, 1, 0))
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)
