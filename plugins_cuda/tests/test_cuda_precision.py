"""The 8-bit precision, on the CPU, where torch computes such products too.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.contract import Device, PrecisionPolicy
from lmcore.plugin.hook_calls import within_dtypes
from lmcore_cpu.device import create_device
from lmcore_cpu.settings import CpuSection
from lmcore_cuda import precision_float8
from lmcore_cuda.plugin import lmcore_precision_policies
from lmcore_cuda.precision import float8_policy

FACTORS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def cpu() -> Device:
    found = create_device(CpuSection())
    return dataclasses.replace(found, dtypes=found.dtypes | {"float8_e4m3fn"})


def policy() -> PrecisionPolicy:
    return float8_policy(cpu())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
@pytest.mark.parametrize("dtype,step", [(FACTORS, 2**-4), (GRADIENTS, 2**-3)])
def test_quantize(dtype: torch.dtype, step: float, size: float) -> None:
    """Values come back to half a step of the mantissa, whatever their size; the scale is exact."""
    x = size * draw(64, 64)
    small, scale = precision_float8.quantize(x, dtype)
    assert small.dtype == dtype
    assert torch.log2(scale).frac() == 0
    back = small.double() * scale.double()
    largest = x.abs().max()
    normal = x.abs() > largest * 2**-12
    assert ((back - x.double()).abs()[normal] <= step * x.abs()[normal].double()).all()
    assert small.float().abs().max() > torch.finfo(dtype).max / 4


def test_quantize_extremes() -> None:
    """Zeros stay zeros, the largest number fits, and what is not finite is not hidden."""
    small, scale = precision_float8.quantize(torch.zeros(4), FACTORS)
    assert small.float().abs().max() == 0
    assert scale.isfinite()
    for largest in (448.0, 1.0, 0.875, 3e38, 1e-11):
        small, scale = precision_float8.quantize(torch.tensor([largest]), FACTORS)
        assert (small.float() * scale).item() == pytest.approx(largest, rel=2**-4)
    for bad in (float("nan"), float("inf")):
        small, scale = precision_float8.quantize(torch.tensor([1.0, bad]), FACTORS)
        assert not (small.float() * scale).isfinite().all()


def gradients(function: Any, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> list[Tensor]:
    leaves = [
        None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in (x, w, b)
    ]
    out = function(*leaves)
    out.backward(g.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize("rows", [32, 21, 1])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(rows: int, *, with_bias: bool) -> None:
    """All three products agree with float64 to the precision of 8 bits, as do small gradients."""
    x, w, g = draw(rows, 64), 0.02 * draw(48, 64), 1e-6 * draw(rows, 48)
    b = draw(48) if with_bias else None
    found = gradients(precision_float8.linear, x, w, b, g)
    right = gradients(
        functional.linear, x.double(), w.double(), None if b is None else b.double(), g.double()
    )
    # Half a step is 2^-4 of a number in e4m3 and 2^-3 in e5m2; over a sum they partly cancel.
    for tensor, wanted, limit in zip(found, right, (0.05, 0.1, 0.1, 0.005), strict=False):
        assert (tensor.double() - wanted).norm() <= limit * wanted.norm()
    assert found[0].dtype == torch.bfloat16
    assert {tensor.dtype for tensor in found[1:]} == {torch.float32}


def test_linear_computes_in_8_bits() -> None:
    """Products are exactly the products of the factors rounded to 8 bits."""
    x, w = draw(16, 32), draw(16, 32)
    small = [precision_float8.quantize(tensor, FACTORS) for tensor in (x, w)]
    x8, w8 = (tensor.double() * scale.double() for tensor, scale in small)
    found = precision_float8.linear(x, w, None)
    torch.testing.assert_close(found.double(), x8 @ w8.T, rtol=2**-8, atol=1e-6)
    assert (x8 - x).norm() > 0.01 * x.norm()


def test_keeps_8_bits_for_the_backward_pass() -> None:
    """Tensors saved for the backward pass take a byte for each element of input and weight."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        precision_float8.linear(draw(32, 64).requires_grad_(), draw(48, 64).requires_grad_(), None)
    assert sorted(tensor.nbytes for tensor in kept) == [4, 4, 32 * 64, 48 * 64]


@pytest.mark.parametrize("shape", [(48, 60), (50, 64)])
def test_sizes_that_hardware_does_not_take(shape: tuple[int, int]) -> None:
    """A projection whose sizes are no multiples of 16 is computed as under `bf16`."""
    x, w = draw(8, shape[1]), draw(*shape)
    with policy().context():
        found = precision_float8.linear(x, w, None)
        assert torch.equal(found, functional.linear(x, w))
    assert found.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, to itself
def test_compiles_whole() -> None:
    """A compiled block takes forward and backward in without a break, with the same bits."""
    x, w, g = draw(2, 16, 64).flatten(0, 1), draw(48, 64), draw(32, 48)
    compiled = torch.compile(precision_float8.linear, backend="aot_eager", fullgraph=True)
    for tensor, wanted in zip(
        gradients(compiled, x, w, None, g),
        gradients(precision_float8.linear, x, w, None, g),
        strict=True,
    ):
        assert torch.equal(tensor, wanted)


def test_policy_is_in_force() -> None:
    """The core's own proofs hold: dtypes and exact numbers of a layer, and the built model."""
    found = policy()
    found.verify(cpu())
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found.apply(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with found.context():
        plain = functional.linear(draw(16, 32), model[0].weight, model[0].bias)
        assert not torch.equal(model[0](draw(16, 32)), plain)
    assert found.words == (
        "fp8: products in float8_e4m3fn to bfloat16 (dynamic tensorwise scaling), weights in "
        "float32, gradients summed in float32"
    )


class WithOp(nn.Linear):
    """A projection by a bound op, as the core's are."""

    def __init__(self) -> None:
        super().__init__(32, 16)
        self.op = functional.linear

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.op(input, self.weight, self.bias)


def test_a_bound_op_is_exchanged() -> None:
    """A projection that calls a bound op gets another op: what is wrapped around it later stays."""
    layer = WithOp()
    policy().apply(nn.Sequential(layer))
    assert layer.op is precision_float8.linear
    assert "forward" not in vars(layer)


def test_a_gpu_without() -> None:
    """On a device without 8-bit products the policy is offered as unavailable, with the reason."""
    device: Any = SimpleNamespace(type="cuda", dtypes=frozenset({"float32"}), facts={})
    found = {policy.name: policy for policy in lmcore_precision_policies(device)}
    assert set(found) == {"fp32", "fp16", "fp8"}
    assert "not in float8_e4m3fn" in str(within_dtypes(found["fp8"], device).available())
    recent: Any = SimpleNamespace(
        type="cuda", dtypes=frozenset({"bfloat16", "float8_e4m3fn"}), facts={}
    )
    policies = {policy.name: policy for policy in lmcore_precision_policies(recent)}
    assert within_dtypes(policies["fp8"], recent).available() is None
    assert max(policies.values(), key=lambda policy: policy.priority).name == "bf16"


def test_trains_as_bf16_does() -> None:
    """A small network learns a function as well in 8 bits as in bfloat16."""
    torch.manual_seed(0)
    x = draw(64, 16)
    y = torch.sin(x @ draw(16, 16, seed=5) / 4)
    losses = {}
    for name in ("fp8", "bf16"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        if name == "fp8":
            policy().apply(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(50):
            optimizer.zero_grad()
            with policy().context():
                loss = functional.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["bf16"] < 0.02
    assert losses["fp8"] < 1.3 * losses["bf16"] + 0.005
