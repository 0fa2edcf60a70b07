"""The CPU's attention in blocks: torch's own results, with torch's random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmcore.contract.op import torch_kernels
from lmcore_cpu.kernel import attention as module
from lmcore_cpu.kernel.attention import attention

BATCH, HEADS, CHANNELS = 2, 4, 6


def inputs(queries: int, keys: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = ((HEADS, queries), (groups, keys), (groups, keys))
    return [
        torch.randn(BATCH, heads, rows, CHANNELS, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)  # as a packed projection lies in memory
        .requires_grad_()
        for heads, rows in sizes
    ]


def run(function, tensors: list[Tensor], **options) -> list[Tensor]:
    """Return the output and gradients; the random numbers are the same in each call."""
    torch.manual_seed(9)
    out = function(*tensors, **options)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad(out, tensors, grad)
    return [out.detach(), *grads, torch.rand(3)]


@pytest.mark.parametrize("rows", [1, 4, 7, 128])
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [10, 13])
def test_it_equals_torchs(monkeypatch, rows, groups, causal, keys):
    """Output, gradients, and the generator's state after, for each size of a block."""
    monkeypatch.setattr(module, "_ROWS", rows)
    tensors = inputs(10, keys, groups, torch.float64)
    options = {"causal": causal, "dropout": 0.3}
    for left, right in zip(
        run(attention, tensors, **options),
        run(torch_kernels.attention, tensors, **options),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(BATCH, 1, 1, 13), (BATCH, HEADS, 10, 13), (1, 1, 10, 13)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_hides_keys(monkeypatch, shape, causal):
    """The mask is broadcast, and goes together with the triangle."""
    monkeypatch.setattr(module, "_ROWS", 4)
    tensors = inputs(10, 13, 2, torch.float64)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., 0] = False
    options = {"causal": causal, "dropout": 0.2, "mask": mask}
    for left, right in zip(
        run(attention, tensors, **options),
        run(torch_kernels.attention, tensors, **options),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_rows_that_are_hidden_whole_give_zeros():
    """By the mask, or because there are more queries than keys."""
    tensors = inputs(6, 6, HEADS, torch.float32)
    mask = torch.zeros(BATCH, 1, 6, 6, dtype=torch.bool)
    mask[1, :, 2] = True
    out, *grads, _ = run(attention, tensors, causal=False, dropout=0.1, mask=mask)
    assert not out[1, :, 2].any()
    assert all(grad.isfinite().all() for grad in grads)
    out, *grads, _ = run(attention, inputs(6, 4, HEADS, torch.float32), causal=True, dropout=0.1)
    assert not out[:, :, :2].any()
    assert out[:, :, 2:].any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_dtypes(dtype, autocast):
    """Results and gradients have the inputs' dtype, and its precision."""
    tensors = inputs(9, 9, HEADS, dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", enabled=autocast):
        found = run(attention, tensors, causal=True, dropout=0.3)
    expected = run(torch_kernels.attention, wide, causal=True, dropout=0.3)
    for left, right in zip(found[:-1], expected[:-1], strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["computed again", "kept"])
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("length", [11, 16])
def test_short_sequences_without_dropout(monkeypatch, kept, groups, length):
    """Causal attention over whole sequences, its probabilities kept or computed again."""
    monkeypatch.setattr(module, "_ROWS", 4)
    monkeypatch.setattr(module, "_KEPT_BYTES", kept)
    monkeypatch.setattr(
        torch_kernels, "attention", lambda *_, **__: pytest.fail("torch's own is called")
    )
    tensors = inputs(length, length, groups, torch.float32)
    found = run(attention, tensors, causal=True)
    monkeypatch.undo()
    for left, right in zip(found, run(torch_kernels.attention, tensors, causal=True), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=2e-6)


def test_without_dropout_it_is_torchs():
    """In evaluation the function that was bound for training is called without dropout."""
    tensors = inputs(5, 5, HEADS, torch.float32)
    for left, right in zip(
        run(attention, tensors, causal=True),
        run(torch_kernels.attention, tensors, causal=True),
        strict=True,
    ):
        assert torch.equal(left, right)


def test_nothing_is_kept_without_gradients():
    """A forward pass under `no_grad` draws the same numbers."""
    tensors = inputs(5, 5, HEADS, torch.float32)
    out, *_ = run(attention, tensors, causal=True, dropout=0.5)
    torch.manual_seed(9)
    with torch.no_grad():
        assert torch.equal(attention(*tensors, causal=True, dropout=0.5), out)
