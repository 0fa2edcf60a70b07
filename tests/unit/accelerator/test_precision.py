"""Precision and recompute policies: what they promise, and the proof that it holds."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from lmcore.accelerator import autocast_policy, full_policy, full_precision_policy, none_policy
from lmcore.errors import DeviceError

CPU = types.SimpleNamespace(type="cpu", torch_device=torch.device("cpu"))


def test_full_precision_holds():
    """Everything is float32, and a product proves it."""
    policy = full_precision_policy(CPU)
    assert (policy.name, policy.compute, policy.keep, policy.reduce) == ("fp32", *["float32"] * 3)
    policy.verify()


def test_autocast_computes_low_and_keeps_high():
    """Products are bfloat16 inside the context, parameters stay float32."""
    policy = autocast_policy(CPU, name="bf16", compute="bfloat16")
    policy.verify()
    layer = torch.nn.Linear(4, 4)
    with policy.context():
        assert layer(torch.ones(1, 4)).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    assert (policy.keep, policy.reduce) == ("float32", "float32")


def test_autocast_that_is_silently_off_is_an_error(monkeypatch):
    """A device on which torch disables autocast does not pass for half precision."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    with pytest.raises(DeviceError, match="`bf16` is not in force") as error:
        autocast_policy(CPU, name="bf16", compute="bfloat16").verify()
    assert "torch.float32" in error.value.why


def test_full_precision_inside_autocast_is_an_error():
    """What surrounds the policy cannot weaken it unseen."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DeviceError, match="`fp32`"):
        full_precision_policy(CPU).verify()


def test_wrong_products_are_an_error(monkeypatch):
    """A device that multiplies wrongly is caught before training."""
    wrong = torch.full((8, 8), 7.0)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight: wrong)
    with pytest.raises(DeviceError, match="wrong products"):
        full_precision_policy(CPU).verify()


def test_recompute_gives_the_same_gradients_with_dropout():
    """`full` draws the same dropout again, so that it changes memory and nothing else."""
    assert none_policy().run is None
    block = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 6))
    x = torch.randn(3, 6)
    grads = []
    for run in (lambda module, *tensors: module(*tensors), full_policy().run):
        torch.manual_seed(1)
        block.zero_grad()
        run(block, x).square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in block.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


def test_recompute_runs_the_block_again_in_backward():
    """Only the block's input is kept: backward calls it a second time."""
    calls = []

    def block(x):
        calls.append(1)
        return (x * 2).sin()

    full_policy().run(block, torch.ones(2, requires_grad=True)).sum().backward()
    assert len(calls) == 2
