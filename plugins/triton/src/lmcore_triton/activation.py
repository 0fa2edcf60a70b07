"""`bias_gelu` and `swiglu`: the input is kept, and the rest is recomputed for the gradient.

Shapes: B batch, S sequence, F feed-forward, R rows (B*S), P parts of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import wrap_triton

from lmcore_triton.kernel.activation import (
    bias_gelu_backward,
    bias_gelu_forward,
    swiglu_backward,
    swiglu_forward,
)
from lmcore_triton.launching import column_block, is_traced, kernel_op, matrix_of, num_parts

__all__ = ["bias_gelu", "swiglu"]

_TILE = 1024


def _tile(width: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and how many tiles are side by side."""
    block = column_block(width, _TILE)
    return max(1, _TILE // block), block, -(-width // block)


@kernel_op("bias_gelu_forward")
def _gelu_forward(x_BSF: Tensor, bias_F: Tensor) -> Tensor:
    x_RF = matrix_of(x_BSF)
    num_rows, width = x_RF.shape
    out_BSF = torch.empty_like(x_BSF, memory_format=torch.contiguous_format)
    if not num_rows:
        return out_BSF
    rows, block, across = _tile(width)
    kernel = wrap_triton(bias_gelu_forward) if is_traced(x_BSF) else bias_gelu_forward
    kernel[(-(-num_rows // rows), across)](
        x_RF,
        bias_F.contiguous(),
        out_BSF,
        x_RF.stride(0),
        num_rows,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
    )
    return out_BSF


@kernel_op("bias_gelu_backward")
def _gelu_backward(grad_BSF: Tensor, x_BSF: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    grad_RF, x_RF = matrix_of(grad_BSF), matrix_of(x_BSF)
    num_rows, width = x_RF.shape
    grad_x_BSF = torch.empty_like(x_BSF, memory_format=torch.contiguous_format)
    if not num_rows:
        return grad_x_BSF, torch.zeros_like(bias_F)
    rows, block, across = _tile(width)
    parts = num_parts(num_rows, rows * 4, across)
    bias_PF = torch.empty(parts, width, dtype=torch.float32, device=x_BSF.device)
    kernel = wrap_triton(bias_gelu_backward) if is_traced(x_BSF) else bias_gelu_backward
    kernel[(across, parts)](
        grad_RF,
        x_RF,
        bias_F.contiguous(),
        grad_x_BSF,
        bias_PF,
        grad_RF.stride(0),
        x_RF.stride(0),
        num_rows,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
    )
    return grad_x_BSF, bias_PF.sum(0).to(bias_F.dtype)


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, bias_F: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSF, bias_F)
        return _gelu_forward(x_BSF, bias_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor, Tensor]:
        return _gelu_backward(grad_BSF, *ctx.saved_tensors)


def bias_gelu(x_BSF: Tensor, bias_F: Tensor) -> Tensor:
    """Return GELU(x + bias), tanh form."""
    return _BiasGELU.apply(x_BSF, bias_F)  # type: ignore[no-untyped-call,no-any-return]


@kernel_op("swiglu_forward")
def _swiglu_forward(x_BS2F: Tensor) -> Tensor:
    x_R2F = matrix_of(x_BS2F)
    num_rows, width = x_R2F.shape[0], x_R2F.shape[1] // 2
    out_BSF = x_BS2F.new_empty(*x_BS2F.shape[:-1], width)
    if not num_rows:
        return out_BSF
    rows, block, across = _tile(width)
    kernel = wrap_triton(swiglu_forward) if is_traced(x_BS2F) else swiglu_forward
    kernel[(-(-num_rows // rows), across)](
        x_R2F, out_BSF, x_R2F.stride(0), num_rows, WIDTH=width, ROWS=rows, BLOCK=block
    )
    return out_BSF


@kernel_op("swiglu_backward")
def _swiglu_backward(grad_BSF: Tensor, x_BS2F: Tensor) -> Tensor:
    grad_RF, x_R2F = matrix_of(grad_BSF), matrix_of(x_BS2F)
    num_rows, width = grad_RF.shape
    grad_x_BS2F = torch.empty_like(x_BS2F, memory_format=torch.contiguous_format)
    if not num_rows:
        return grad_x_BS2F
    rows, block, across = _tile(width)
    kernel = wrap_triton(swiglu_backward) if is_traced(x_BS2F) else swiglu_backward
    kernel[(-(-num_rows // rows), across)](
        grad_RF,
        x_R2F,
        grad_x_BS2F,
        grad_RF.stride(0),
        x_R2F.stride(0),
        num_rows,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
    )
    return grad_x_BS2F


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BS2F: Tensor) -> Tensor:
        ctx.save_for_backward(x_BS2F)
        return _swiglu_forward(x_BS2F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> Tensor:
        return _swiglu_backward(grad_BSF, *ctx.saved_tensors)


def swiglu(x_BS2F: Tensor) -> Tensor:
    """Return SiLU of the first half of the last dim, times the second half."""
    return _SwiGLU.apply(x_BS2F)  # type: ignore[no-untyped-call,no-any-return]
