"""`bias_dropout_add`: no mask is kept, its numbers are drawn again in the backward pass.

Backward keeps a seed of 8 bytes, drawn on the device from its own generator.  So a layer that is
computed again under a restored state, and a run that continues from a checkpoint, drop the same
elements; and nothing waits for the device.

Shapes: B batch, S sequence, H hidden, R rows (B*S), P parts of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import wrap_triton

from lmcore_triton.kernel.dropout import bias_dropout_add_backward, bias_dropout_add_forward
from lmcore_triton.launching import is_traced, kernel_op, matrix_of, num_parts

__all__ = ["bias_dropout_add"]

_ROWS, _PART = 16, 64
"""A tile's rows, and a quarter of its columns: they decide which number an element gets."""

_SEEDS = 2**62


def _factor(dropout: float) -> float:
    """Return the factor of kept elements."""
    return 1.0 / (1.0 - dropout) if dropout < 1 else 0.0


@kernel_op("bias_dropout_add_forward")
def _forward(
    x_BSH: Tensor, bias_H: Tensor | None, residual_BSH: Tensor, seed: Tensor | None, dropout: float
) -> Tensor:
    x_RH, residual_RH = matrix_of(x_BSH), matrix_of(residual_BSH)
    num_rows, hidden = x_RH.shape
    out_BSH = torch.empty_like(residual_BSH, memory_format=torch.contiguous_format)
    if not num_rows:
        return out_BSH
    kernel = wrap_triton(bias_dropout_add_forward) if is_traced(x_BSH) else bias_dropout_add_forward
    kernel[(-(-num_rows // _ROWS), -(-hidden // (4 * _PART)))](
        x_RH,
        x_RH if bias_H is None else bias_H.contiguous(),
        residual_RH,
        out_BSH,
        x_RH if seed is None else seed,
        x_RH.stride(0),
        residual_RH.stride(0),
        num_rows,
        dropout,
        _factor(dropout),
        WIDTH=hidden,
        BIAS=bias_H is not None,
        DROPOUT=seed is not None,
        ROWS=_ROWS,
        PART=_PART,
    )
    return out_BSH


@kernel_op("bias_dropout_add_backward")
def _backward(
    grad_BSH: Tensor, seed: Tensor | None, dropout: float, dtype: torch.dtype, *, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, in float32, of the bias, empty if there is none.

    The gradient of x is empty if it would be a copy of *grad_BSH*.
    """
    grad_RH = matrix_of(grad_BSH)
    num_rows, hidden = grad_RH.shape
    write = seed is not None or dtype != grad_BSH.dtype
    grad_x_BSH = grad_BSH.new_empty(grad_BSH.shape if write else (0,), dtype=dtype)
    across = -(-hidden // (4 * _PART))
    parts = num_parts(num_rows, _ROWS, across)
    bias_PH = grad_BSH.new_empty(parts if has_bias else 0, hidden, dtype=torch.float32)
    if not num_rows:
        return grad_x_BSH, bias_PH.new_zeros(hidden if has_bias else 0)
    kernel = (
        wrap_triton(bias_dropout_add_backward) if is_traced(grad_BSH) else bias_dropout_add_backward
    )
    kernel[(across, parts)](
        grad_RH,
        grad_x_BSH,
        bias_PH,
        grad_RH if seed is None else seed,
        grad_RH.stride(0),
        num_rows,
        dropout,
        _factor(dropout),
        WIDTH=hidden,
        BIAS=has_bias,
        DROPOUT=seed is not None,
        WRITE=write,
        ROWS=_ROWS,
        PART=_PART,
    )
    return grad_x_BSH, bias_PH.sum(0) if has_bias else bias_PH.view(0)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: Tensor,
        bias_H: Tensor | None,
        residual_BSH: Tensor,
        seed: Tensor | None,
        dropout: float,
    ) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.dropout, ctx.dtype = dropout, x_BSH.dtype
        ctx.bias_dtype = None if bias_H is None else bias_H.dtype
        return _forward(x_BSH, bias_H, residual_BSH, seed, dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
        (seed,) = ctx.saved_tensors
        has_bias = ctx.bias_dtype is not None
        grad_x_BSH, grad_bias_H = grad_BSH, None
        if seed is not None or has_bias or ctx.dtype != grad_BSH.dtype:
            written, wide_H = _backward(grad_BSH, seed, ctx.dropout, ctx.dtype, has_bias=has_bias)
            if seed is not None or ctx.dtype != grad_BSH.dtype:
                grad_x_BSH = written
            grad_bias_H = wide_H.to(ctx.bias_dtype) if has_bias else None
        return grad_x_BSH, grad_bias_H, grad_BSH, None, None


def bias_dropout_add(
    x_BSH: Tensor,
    bias_H: Tensor | None,
    residual_BSH: Tensor,
    *,
    dropout: float,
    training: bool,
) -> Tensor:
    """Return residual + dropout(x + bias), in the residual's dtype."""
    seed = None
    if training and dropout > 0:
        seed = torch.randint(_SEEDS, (1,), device=x_BSH.device)
    return _BiasDropoutAdd.apply(x_BSH, bias_H, residual_BSH, seed, dropout)  # type: ignore[no-untyped-call,no-any-return]
