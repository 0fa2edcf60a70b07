"""`layer_norm` and `rms_norm`: one pass forward, one pass backward with the sums for the weights.

Shapes: B batch, S sequence, H hidden, R rows (B*S), P parts of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import wrap_triton

from lmcore.base.errors import LmcoreError
from lmcore_triton.kernel.norm import norm_backward, norm_forward
from lmcore_triton.launching import (
    is_traced,
    kernel_op,
    matrix_of,
    num_parts,
    power_of_two,
    warps_for,
)
from lmcore_triton.offers import WIDEST_NORM

__all__ = ["layer_norm", "rms_norm"]

_TILE = 1024


def _tile(hidden: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and its warps."""
    if hidden > WIDEST_NORM:
        raise LmcoreError(
            f"a row of {hidden} channels is too long for the normalization kernels",
            why=f"they keep a row in registers, at most {WIDEST_NORM} channels",
            hint="use `--ops layer_norm=reference rms_norm=reference`",
        )
    block = power_of_two(hidden)
    rows = max(1, _TILE // block)
    return rows, block, warps_for(rows * block)


@kernel_op("norm_forward")
def _forward(
    x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, and of each row the mean (if there is an offset) and the factor."""
    x_RH = matrix_of(x_BSH)
    num_rows, hidden = x_RH.shape
    out_BSH = torch.empty_like(x_BSH, memory_format=torch.contiguous_format)
    scale_R = torch.empty(num_rows, dtype=torch.float32, device=x_BSH.device)
    mean_R = torch.empty_like(scale_R) if bias_H is not None else scale_R.new_empty(0)
    if not num_rows:
        return out_BSH, mean_R, scale_R
    rows, block, warps = _tile(hidden)
    kernel = wrap_triton(norm_forward) if is_traced(x_BSH) else norm_forward
    kernel[(-(-num_rows // rows),)](
        x_RH,
        weight_H.contiguous(),
        weight_H if bias_H is None else bias_H.contiguous(),
        out_BSH,
        mean_R,
        scale_R,
        x_RH.stride(0),
        num_rows,
        epsilon,
        WIDTH=hidden,
        CENTRED=bias_H is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return out_BSH, mean_R, scale_R


@kernel_op("norm_backward")
def _backward(
    grad_BSH: Tensor,
    x_BSH: Tensor,
    weight_H: Tensor,
    mean_R: Tensor,
    scale_R: Tensor,
    *,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the gain and, empty if not *centred*, of the offset."""
    grad_RH, x_RH = matrix_of(grad_BSH), matrix_of(x_BSH)
    num_rows, hidden = x_RH.shape
    grad_x_BSH = torch.empty_like(x_BSH, memory_format=torch.contiguous_format)
    if not num_rows:
        none_H = torch.zeros_like(weight_H)
        return grad_x_BSH, none_H, none_H.clone() if centred else none_H.new_empty(0)
    rows, block, warps = _tile(hidden)
    parts = num_parts(num_rows, rows * 4, 2 if block <= _TILE else 4)
    weight_PH = torch.empty(parts, hidden, dtype=torch.float32, device=x_BSH.device)
    bias_PH = torch.empty_like(weight_PH) if centred else weight_PH.new_empty(0)
    kernel = wrap_triton(norm_backward) if is_traced(x_BSH) else norm_backward
    kernel[(parts,)](
        grad_RH,
        x_RH,
        weight_H.contiguous(),
        mean_R,
        scale_R,
        grad_x_BSH,
        weight_PH,
        bias_PH,
        grad_RH.stride(0),
        x_RH.stride(0),
        num_rows,
        WIDTH=hidden,
        CENTRED=centred,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    grad_weight_H = weight_PH.sum(0).to(weight_H.dtype)
    return grad_x_BSH, grad_weight_H, bias_PH.sum(0) if centred else bias_PH


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float
    ) -> Tensor:
        out_BSH, mean_R, scale_R = _forward(x_BSH, weight_H, bias_H, epsilon)
        ctx.save_for_backward(x_BSH, weight_H, mean_R, scale_R)
        ctx.bias_dtype = bias_H.dtype
        return out_BSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_BSH, weight_H, mean_R, scale_R = ctx.saved_tensors
        grad_x_BSH, grad_weight_H, grad_bias_H = _backward(
            grad_BSH, x_BSH, weight_H, mean_R, scale_R, centred=True
        )
        return grad_x_BSH, grad_weight_H, grad_bias_H.to(ctx.bias_dtype), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        out_BSH, mean_R, scale_R = _forward(x_BSH, weight_H, None, epsilon)
        ctx.save_for_backward(x_BSH, weight_H, mean_R, scale_R)
        return out_BSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BSH, weight_H, mean_R, scale_R = ctx.saved_tensors
        grad_x_BSH, grad_weight_H, _ = _backward(
            grad_BSH, x_BSH, weight_H, mean_R, scale_R, centred=False
        )
        return grad_x_BSH, grad_weight_H, None


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    return _LayerNorm.apply(x_BSH, weight_H, bias_H, epsilon)  # type: ignore[no-untyped-call,no-any-return]


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    return _RMSNorm.apply(x_BSH, weight_H, epsilon)  # type: ignore[no-untyped-call,no-any-return]
