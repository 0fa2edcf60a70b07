"""`scaled_masked_softmax`: a pass forward and one backward, which keeps the probabilities alone.

Shapes: B batch, N heads, S queries, T keys, R rows (B*N*S).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import wrap_triton

from lmcore.base.errors import LmcoreError
from lmcore_triton.kernel.softmax import softmax_backward, softmax_forward
from lmcore_triton.launching import is_traced, kernel_op, matrix_of, power_of_two, warps_for
from lmcore_triton.offers import WIDEST_SOFTMAX

__all__ = ["scaled_masked_softmax"]

_TILE = 1024


def _tile(keys: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and its warps."""
    if keys > WIDEST_SOFTMAX:
        raise LmcoreError(
            f"a row of {keys} scores is too long for the softmax kernel",
            why=f"it keeps a row in registers, at most {WIDEST_SOFTMAX} scores",
            hint="use `--ops scaled_masked_softmax=reference`",
        )
    block = power_of_two(keys)
    rows = max(1, _TILE // block)
    return rows, block, warps_for(rows * block)


def _four_dims(x: Tensor) -> Tensor:
    """Return *x* with three dims before the last."""
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x.flatten(0, x.ndim - 4)


@kernel_op("softmax_forward")
def _forward(x_BNST: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    x_RT = matrix_of(x_BNST)
    num_rows, keys = x_RT.shape
    out_BNST = torch.empty_like(x_BNST, memory_format=torch.contiguous_format)
    if not num_rows:
        return out_BNST
    rows, block, warps = _tile(keys)
    heads = queries = 1
    strides: tuple[int, ...] = (0, 0, 0, 0)
    hidden: Tensor = x_RT
    if mask is not None:
        wide = _four_dims(mask.expand(x_BNST.shape))
        heads, queries = wide.shape[1], wide.shape[2]
        strides, hidden = wide.stride(), wide.view(torch.uint8)
    kernel = wrap_triton(softmax_forward) if is_traced(x_BNST) else softmax_forward
    kernel[(-(-num_rows // rows),)](
        x_RT,
        hidden,
        out_BNST,
        scale,
        x_RT.stride(0),
        num_rows,
        heads,
        queries,
        *strides,
        WIDTH=keys,
        MASKED=mask is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return out_BNST


@kernel_op("softmax_backward")
def _backward(grad_BNST: Tensor, probability_BNST: Tensor, scale: float) -> Tensor:
    grad_RT = matrix_of(grad_BNST)
    num_rows, keys = grad_RT.shape
    grad_x_BNST = torch.empty_like(probability_BNST)
    if not num_rows:
        return grad_x_BNST
    rows, block, warps = _tile(keys)
    kernel = wrap_triton(softmax_backward) if is_traced(grad_BNST) else softmax_backward
    kernel[(-(-num_rows // rows),)](
        grad_RT,
        probability_BNST,
        grad_x_BNST,
        scale,
        grad_RT.stride(0),
        num_rows,
        WIDTH=keys,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return grad_x_BNST


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BNST: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        out_BNST = _forward(x_BNST, mask, scale)
        ctx.save_for_backward(out_BNST)
        ctx.scale = scale
        return out_BNST

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNST: Tensor) -> tuple[Tensor, None, None]:
        (probability_BNST,) = ctx.saved_tensors
        return _backward(grad_BNST, probability_BNST, ctx.scale), None, None


def scaled_masked_softmax(x_BNST: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the softmax over the last dim of ``x * scale``.

    True in *mask* (broadcastable) hides an entry.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise LmcoreError(f"a mask of `scaled_masked_softmax` is boolean, not {mask.dtype}")
    return _Softmax.apply(x_BNST, mask, scale)  # type: ignore[no-untyped-call,no-any-return]
