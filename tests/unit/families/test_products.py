"""The dtypes of a built model's products: counted in one layer of each kind and the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lmcore.base.errors import DeviceError
from lmcore.contract import PrecisionPolicy, autocast_policy, full_precision_policy
from lmcore.contract.op import reference, torch_kernels
from lmcore.families.build import apply_precision

create_device = pytest.importorskip("lmcore_cpu.device").create_device
CpuSection = pytest.importorskip("lmcore_cpu.settings").CpuSection


@pytest.fixture
def runtime() -> Callable[..., Any]:
    """Makes the part of a runtime that the check uses, on the host."""
    device = create_device(CpuSection())

    def make(policy: PrecisionPolicy | None = None) -> Any:
        policy = policy or autocast_policy(device, name="bf16", compute="bfloat16")
        return SimpleNamespace(device=device, precision=policy, rng=device.rng_tracker())

    return make


def test_the_cost_does_not_grow_with_the_number_of_layers(make_model: Any, runtime: Any) -> None:
    """Equal layers are one kind; forward and backward of layer and head are counted."""
    found = [apply_precision(make_model(num_layers=number), runtime()) for number in (1, 5)]
    assert found[0].counts == found[1].counts
    rows = found[0].to_list()
    assert {row["part"] for row in rows} == {"layers", "head"}
    assert {row["pass"] for row in rows} == {"forward", "backward"}
    assert {row["dtype"] for row in rows if row["part"] == "layers"} == {"bfloat16"}
    assert (
        sum(row["count"] for row in rows if row["op"] == "addmm" and row["part"] == "layers") == 1
    )


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_is_left_behind(make_model: Any, runtime: Any, *, masked: bool) -> None:
    """Weights, gradients and random states stay unchanged, with dropout and a mask."""
    model = make_model(attention_dropout=0.1, hidden_dropout=0.1, masked=masked)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    apply_precision(model, runtime())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_model_without_memory_stays_so(make_model: Any, runtime: Any) -> None:
    """Only the layer that runs gets memory, and returns it."""
    model = make_model().to("meta")
    found = apply_precision(model, runtime())
    assert found.counts
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_llama_in_float32(make_model: Any, runtime: Any) -> None:
    """Rotary positions, grouped queries and gated layers run, too."""
    options = {"position_embedding_type": "rope", "num_query_groups": 1, "swiglu": True}
    model = make_model(**options, normalization="RMSNorm", add_bias_linear=False)
    policy = full_precision_policy()
    found = apply_precision(model, runtime(policy))
    assert {row["dtype"] for row in found.to_list()} == {"float32"}
    assert found.wider_words() == ""


def test_a_llama_in_half_precision(make_model: Any, runtime: Any) -> None:
    """The weighted sums of a norm's gradient are in float32, and are no products of the model."""
    options = {"position_embedding_type": "rope", "num_query_groups": 1, "swiglu": True}
    model = make_model(**options, normalization="RMSNorm", add_bias_linear=False)
    rows = apply_precision(model, runtime()).to_list()
    assert {row["dtype"] for row in rows if row["part"] == "layers"} == {"bfloat16"}


def as_float32(value: Any) -> Any:
    """Return a floating-point tensor in float32, another value as it is."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def widened(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an op that computes in float32 whatever autocast says, and rounds the result."""

    def wide(*tensors: Any, **options: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return op(*map(as_float32, tensors), **options).bfloat16()

    return wide


def biased(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Project in bfloat16, with bias in float32."""
    return (functional.linear if bias is None else widened(functional.linear))(x, weight, bias)


@pytest.mark.parametrize(
    "number, why",
    [
        (0, "products are in float32, not bfloat16: mm 2 (backward), addmm 1 (forward)"),
        (1, "products are in float32, not bfloat16: mm 2 (backward), addmm 1 (forward)"),
    ],
)
def test_a_projection_with_bias_in_another_dtype(
    make_model: Any, runtime: Any, number: int, why: str
) -> None:
    """The result's dtype is right, the product's is not; in the first layer or in a later one."""
    model = make_model()
    model.layers[number].attention.qkv.op = biased
    with pytest.raises(DeviceError, match="`bf16` is not applied in the model") as caught:
        apply_precision(model, runtime())
    assert why in str(caught.value.why)
    assert "`lmcore ops explain linear`" in str(caught.value.hint)


def test_attention_in_another_dtype(make_model: Any, runtime: Any) -> None:
    """A kernel may widen, and the run says so; the reference widens only without autocast."""
    model = make_model()
    for attention in model.attentions:
        attention.op = widened(reference.attention)
    found = apply_precision(model, runtime())
    assert found.wider_words(head=False) == "; products of attention in float32"
    model.attentions[0].op = reference.attention
    with pytest.raises(DeviceError, match="`bf16` is not applied in the model") as caught:
        apply_precision(model, runtime())
    assert "bmm 6 (2 forward, 4 backward)" in str(caught.value.why)
    assert "`lmcore ops explain attention`" in str(caught.value.hint)
    for attention in model.attentions:
        attention.op = torch_kernels.attention
    assert apply_precision(model, runtime()).wider_words(head=False) == ""


def test_the_head_may_be_wider(make_model: Any, runtime: Any) -> None:
    """The first lines of a run name the head whose kernel keeps float32; narrower is an error."""
    model = make_model()
    model.head_loss.op = widened(reference.linear_cross_entropy)
    found = apply_precision(model, runtime())
    assert found.wider_words() == "; products of the head in float32"
    assert found.wider_words(head=False) == ""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DeviceError, match="`fp32`"):
        apply_precision(make_model(), runtime(full_precision_policy()))
    policy = replace(full_precision_policy(), name="wide", compute="float64", keep="float32")
    with pytest.raises(DeviceError, match="`wide`"):
        apply_precision(make_model(), runtime(policy))
