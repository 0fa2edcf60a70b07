"""Gradient buckets: means over replicas, reduced in order, once a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from lmcore.base.errors import ConfigError, RunError
from lmcore.parallel import gradient_buckets
from lmcore.parallel.gradient_buckets import GradientBuckets
from lmcore.parallel.mesh import Axis

SHARE = 0.5


@pytest.fixture
def axis() -> Iterator[Axis]:
    """Return an axis of two ranks; the other rank has gradients of zero."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield Axis(0, 2, (0, 1), distributed.group.WORLD)
    distributed.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the reduced buffers, in order."""
    sizes: list[int] = []
    real = distributed.all_reduce

    def all_reduce(flat: Tensor, **how: Any) -> Any:
        assert how["async_op"]
        sizes.append(flat.numel())
        return real(flat, **how)

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    return sizes


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def input_of(step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


def expected(steps: range) -> list[Tensor]:
    model = network()
    for step in steps:
        model(input_of(step)).square().sum().backward()
    return [one.grad * SHARE for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("count", [1, 3])
def test_means(axis: Axis, sent: list[int], count: int) -> None:
    """Gradients of all micro-batches of a step are averaged, once, in the last one."""
    model = network()
    buckets = GradientBuckets(model.named_parameters(), axis)
    for turn in range(2):
        for one in model.parameters():
            one.grad = None
        sent.clear()
        steps = range(turn * count, (turn + 1) * count)
        for step in steps:
            assert not sent
            with buckets.backward(last=step == steps[-1]):
                model(input_of(step)).square().sum().backward()
        assert sum(sent) == sum(one.numel() for one in model.parameters())
        found = [one.grad for one in model.parameters()]
        torch.testing.assert_close(found, expected(steps), rtol=1e-6, atol=0.0)


def test_sent_while_backward_runs(
    axis: Axis, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The all-reduce of the last layer starts before the first layer's gradient is computed."""
    monkeypatch.setattr(gradient_buckets, "_FIRST_BYTES", 1)
    monkeypatch.setattr(gradient_buckets, "_BYTES", 100)
    model = network()
    buckets = GradientBuckets(model.named_parameters(), axis)
    seen: list[int] = []
    model[0].weight.register_hook(lambda _grad: seen.append(len(sent)))
    with buckets.backward(last=True):
        model(input_of(0)).square().sum().backward()
    assert sent == [2, 12 + 6 + 36, 6 + 24]
    assert seen == [2]


def test_dtypes_do_not_mix(axis: Axis, sent: list[int]) -> None:
    """Each bucket has one dtype."""
    model = network()
    model[2].double()

    def forward(x: Tensor) -> Tensor:
        return model[4](model[2](model[0](x).double()).float())

    buckets = GradientBuckets(model.named_parameters(), axis)
    with buckets.backward(last=True):
        forward(input_of(0)).sum().backward()
    assert sent == [14, 42, 30]
    assert model[2].weight.grad.dtype == torch.float64


def test_strides(axis: Axis) -> None:
    """Gradients have the strides of their parameters, as fused optimizers need."""
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5)
    convolution(x).square().sum().backward()
    expected = convolution.weight.grad
    convolution.weight.grad = None
    buckets = GradientBuckets(convolution.named_parameters(), axis)
    with buckets.backward(last=True):
        convolution(x).square().sum().backward()
    assert convolution.weight.grad.stride() == convolution.weight.stride() == (27, 1, 9, 3)
    torch.testing.assert_close(convolution.weight.grad, expected * SHARE)


def test_in_order(axis: Axis, sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is full before its turn waits: other ranks may fill them in another order."""
    monkeypatch.setattr(gradient_buckets, "_FIRST_BYTES", 1)
    monkeypatch.setattr(gradient_buckets, "_BYTES", 1)
    sizes = (1, 2, 3)
    weights = {str(size): nn.Parameter(torch.ones(size)) for size in sizes}
    for order in itertools.permutations(sizes):
        buckets = GradientBuckets(weights.items(), axis)
        sent.clear()
        with buckets.backward(last=True):
            for size in order:
                weights[str(size)].sum().backward()
        assert sent == [3, 2, 1]
        for one in weights.values():
            one._post_accumulate_grad_hooks.clear()


def test_in_two_parts(axis: Axis) -> None:
    """A second part of a gradient that has been sent is an error, never a wrong sum."""
    weight = nn.Parameter(torch.ones(2))
    buckets = GradientBuckets([("weight", weight)], axis)
    words = "`weight`.*came in two parts"
    with buckets.backward(last=True):
        weight.sum().backward()
        with pytest.raises(RunError, match=words):
            weight.sum().backward()


def test_no_gradient(axis: Axis) -> None:
    """A parameter that the loss does not depend on is an error."""
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    buckets = GradientBuckets([("weight", weight), ("other", other)], axis)
    with pytest.raises(AssertionError, match="no gradient"), buckets.backward(last=True):
        weight.sum().backward()


def test_all_reduce_at_the_end(axis: Axis, sent: list[int]) -> None:
    """Gradients in the buckets are averaged at the end if no micro-batch was marked as the last."""
    model = network()
    buckets = GradientBuckets(model.named_parameters(), axis)
    for turn in range(2):
        sent.clear()
        for one in model.parameters():
            one.grad = None
        buckets.allocate_gradients()
        held = [one.grad for one in model.parameters()]
        assert not any(one.any() for one in held if one is not None)
        steps = range(2 * turn, 2 * turn + 2)
        for step in steps:
            with buckets.backward(last=False):
                model(input_of(step)).square().sum().backward()
        assert not sent
        buckets.allocate_gradients()  # keeps gradients that exist
        buckets.all_reduce()
        assert sum(sent) == sum(one.numel() for one in model.parameters())
        for one, was, wanted in zip(model.parameters(), held, expected(steps), strict=True):
            assert one.grad is was
            assert torch.allclose(one.grad, wanted, rtol=1e-6, atol=1e-7)


def test_parameters_that_are_frozen_or_unfrozen(axis: Axis, sent: list[int]) -> None:
    """Gradients are averaged in each phase, and absent ones stay None; nothing else is sent."""
    model = network()
    model[0].requires_grad_(requires_grad=False)
    buckets = GradientBuckets(model.named_parameters(), axis, all_used=False)
    for step, trained in enumerate(((2, 4), (0, 2, 4), (2, 4), (0, 4))):
        for index in (0, 2, 4):
            model[index].requires_grad_(requires_grad=index in trained)
        reference = network()
        reference(input_of(step)).square().sum().backward()
        with buckets.backward(last=True):
            model(input_of(step)).square().sum().backward()
        assert buckets.filled
        for name, parameter in model.named_parameters():
            if int(name[0]) in trained:
                wanted = reference.get_parameter(name).grad
                torch.testing.assert_close(parameter.grad, wanted * SHARE, rtol=1e-6, atol=0.0)
            else:
                assert parameter.grad is None
            parameter.grad = None
    assert sent == [14 + 42 + 4, *(14 + 42 + 4, 30 + 2) * 3]


def test_a_model_that_is_not_used(axis: Axis, sent: list[int]) -> None:
    """Nothing is reduced, and gradients of an earlier micro-batch are, in the last one."""
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    buckets = GradientBuckets([("weight", weight), ("other", other)], axis, all_used=False)
    with buckets.backward(last=True):
        pass
    assert not sent
    assert not buckets.filled
    with buckets.backward(last=False):
        weight.sum().backward()
    with buckets.backward(last=True):
        pass
    assert sent == [4 + 2]
    assert weight.grad.tolist() == [SHARE] * 2
    assert other.grad is None


def test_gradients_that_cannot_be_averaged(axis: Axis) -> None:
    """A backward pass outside the context and a sparse gradient name the parameter."""
    table = nn.Embedding(4, 2, sparse=True)
    buckets = GradientBuckets(table.named_parameters(), axis, all_used=False)
    with pytest.raises(ConfigError, match="computes the gradient of `weight` on this rank only"):
        table(torch.tensor([1])).sum().backward()
    for last in (True, False):
        table.weight.grad = None
        error = pytest.raises(ConfigError, match="the gradient of `weight` is sparse")
        with error, buckets.backward(last=last):
            table(torch.tensor([1])).sum().backward()
    table.weight.grad = None
    with pytest.raises(ConfigError, match="on this rank only"):
        table(torch.tensor([1])).sum().backward()
