"""torch's fused functions as kernels: what the references mean, in float64, gradients included."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from lmcore.contract.op import reference, torch_kernels

_SPEC = importlib.util.spec_from_file_location(
    "kernel_cases", Path(__file__).parents[1] / "kernel_cases.py"
)
kernel_cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kernel_cases)
arguments, cast, compare = kernel_cases.arguments, kernel_cases.cast, kernel_cases.compare

TORCH = [
    "layer_norm",
    "rms_norm",
    "linear",
    "bias_gelu",
    "swiglu",
    "bias_dropout_add",
    "scaled_masked_softmax",
    "rotary_embedding",
    "cross_entropy",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", TORCH)
def test_torch(op: str, dtype: torch.dtype) -> None:
    """Kernels of torch's own mean what the references mean, gains in float32 or not."""
    compare(op, getattr(torch_kernels, op), dtype)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_autocast_does_not_change_a_norm_s_dtype(op: str) -> None:
    """Under autocast a norm still gives the dtype that it was given."""
    values, _ = arguments(op)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = getattr(torch_kernels, op)(*cast(op, values, dtype))
        assert out.dtype == dtype


def test_dropout_and_no_bias() -> None:
    """Dropped elements leave the residual; without a bias nothing is added."""
    x, residual = torch.ones(200, 200), torch.zeros(200, 200)
    torch.manual_seed(0)
    out = torch_kernels.bias_dropout_add(x, None, residual, dropout=0.25, training=True)
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((out == 0).float().mean() - 0.25) < 0.02
    out = torch_kernels.bias_dropout_add(x, None, residual, dropout=0.25, training=False)
    assert torch.equal(out, x)


def test_torch_adamw() -> None:
    """The update by torch is the reference's over several steps, with counts that differ."""
    kernel_cases.compare_updates(torch_kernels.adamw)


def test_torch_adamw_of_half_weights() -> None:
    """Weights in bfloat16 with gradients in float32 are brought to one type first."""
    params, grads, firsts, seconds, counts = kernel_cases.state(torch.bfloat16)
    torch_kernels.adamw(
        params, [one.float() for one in grads], firsts, seconds, counts, **kernel_cases.HOW
    )
    assert all(one.dtype == torch.bfloat16 for one in params)
    assert [int(count) for count in counts] == [4, 4, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torch_grad_norm(dtype: torch.dtype) -> None:
    """The norm of a list covers all its numbers, in at least float32; without numbers it is 0."""
    grads = [kernel_cases.draw(300, 70).to(dtype), kernel_cases.draw(5).to(dtype)]
    found = torch_kernels.grad_norm(grads)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(
        found.double(), reference.grad_norm([one.double() for one in grads]), rtol=1e-5, atol=0
    )
    assert torch_kernels.grad_norm([]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [4, 2, 1])
@pytest.mark.parametrize("kernel", ["attention", "attention_expanded"])
def test_attention(kernel: str, shared: int, dtype: torch.dtype) -> None:
    """Attention by torch is the op's, with and without shared keys, causal or not."""
    inputs = kernel_cases.attention_inputs(dtype, shared=shared)
    for causal in (True, False):
        kernel_cases.compare_attention(getattr(torch_kernels, kernel), inputs, causal=causal)


@pytest.mark.parametrize("queries,keys", [(1, 40), (24, 40), (40, 40), (1, 1)])
def test_attention_with_fewer_queries_than_keys(queries: int, keys: int) -> None:
    """The causal triangle ends at the last key, as after a cache or in a part of a sequence."""
    inputs = kernel_cases.attention_inputs(torch.float32, queries=queries, keys=keys, shared=2)
    kernel_cases.compare_attention(torch_kernels.attention, inputs, causal=True)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_a_mask(*, causal: bool) -> None:
    """A mask hides what is True in it, and what causality hides besides."""
    inputs, mask = kernel_cases.attention_inputs(torch.float32, shared=2), kernel_cases.documents()
    kernel_cases.compare_attention(torch_kernels.attention, inputs, causal=causal, mask=mask)
