"""Attention of whole sequences, in float32 and by products of bfloat16 that the processor has.

The C++ of `native/cpu/sequence_attention.hpp` computes forward and backward pass a block of queries
and a block of keys at a time, and keeps of the scores the logarithm of each query's sum.  One core
of an AMD EPYC (family 26), 12 heads of 64 channels, 512 tokens, causal, forward and backward: in
bfloat16 1.5 ms and 3.2 ms, where torch's fused attention takes 9.7 and 18.3; in float32 2.6 and
6.6, where torch takes 9.3 and 23.5.

Shapes: B batch, N heads, K key/value heads, S queries, T keys, D head channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmcore.contract.op import torch_kernels
from lmcore.contract.torch_versions import GROUPED_CPU_ATTENTION
from lmcore_cpu.kernel.native import SEQUENCE_CHANNELS
from lmcore_cpu.kernel.processor import facts

__all__ = ["attention"]

_fused = torch_kernels.attention if GROUPED_CPU_ATTENTION else torch_kernels.attention_expanded


def _rows(x_BNSD: Tensor) -> tuple[int, tuple[int, ...], bool]:
    return x_BNSD.data_ptr(), x_BNSD.stride()[:3], x_BNSD.dtype == torch.float32


def _empty(batch: int, heads: int, rows: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Return memory with the heads of a row side by side, as the next projection reads them."""
    return torch.empty(batch, rows, heads, channels, dtype=dtype).transpose(1, 2)


def _call(arrays: list[Tensor], logs_BNS: Tensor, sizes: tuple[int, ...], *, causal: bool) -> None:
    kernels = facts().kernels
    assert kernels is not None
    kernels.attend_sequences(
        facts().instructions[0],
        [_rows(array) for array in arrays],
        logs_BNS.data_ptr(),
        sizes,
        causal,
        sizes[-1] ** -0.5,
        torch.get_num_threads(),
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNSD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        causal: bool,  # noqa: FBT001 - a function of autograd takes its arguments by position
    ) -> Tensor:
        batch, heads, queries, channels = q_BNSD.shape
        out_BNSD = _empty(batch, heads, queries, channels, q_BNSD.dtype)
        logs_BNS = torch.empty(batch, heads, queries)
        sizes = (batch, heads, k_BKTD.shape[1], queries, k_BKTD.shape[2], channels)
        _call([q_BNSD, k_BKTD, v_BKTD, out_BNSD], logs_BNS, sizes, causal=causal)
        ctx.save_for_backward(q_BNSD, k_BKTD, v_BKTD, out_BNSD, logs_BNS)
        ctx.sizes, ctx.causal = sizes, causal
        return out_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BKTD, v_BKTD, out_BNSD, logs_BNS = ctx.saved_tensors
        batch, heads, groups, queries, keys, channels = ctx.sizes
        dtype = q_BNSD.dtype
        # Gradients of shared keys and values are added in float32.
        wide = dtype if heads == groups else torch.float32
        grads = [
            _empty(batch, heads, queries, channels, dtype),
            _empty(batch, heads, keys, channels, wide),
            _empty(batch, heads, keys, channels, wide),
        ]
        arrays = [q_BNSD, k_BKTD, v_BKTD, out_BNSD, _with_adjacent_channels(grad_BNSD), *grads]
        _call(arrays, logs_BNS, ctx.sizes, causal=ctx.causal)
        if heads != groups:
            grads[1:] = [
                grad.unflatten(1, (groups, heads // groups)).sum(2).to(dtype) for grad in grads[1:]
            ]
        return *grads, None


def _with_adjacent_channels(x_BNSD: Tensor) -> Tensor:
    return x_BNSD if x_BNSD.stride(3) == 1 else x_BNSD.contiguous()


def attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention as the reference; what the kernel does not compute goes torch's way."""
    given: tuple[Tensor, ...] = (q_BNSD, k_BKTD, v_BKTD)
    if torch.is_autocast_enabled("cpu"):
        given = tuple(one.to(torch.get_autocast_dtype("cpu")) for one in given)
    if (
        mask is not None
        or dropout
        or any(one.dtype != given[0].dtype or not one.numel() for one in given)
        or (causal and q_BNSD.shape[2] != k_BKTD.shape[2])
        or q_BNSD.shape[3] % SEQUENCE_CHANNELS
        or not facts().attends_sequences(str(given[0].dtype).removeprefix("torch."))
    ):
        return _fused(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout, mask=mask)
    found: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        *(_with_adjacent_channels(one) for one in given), causal
    )
    return found
