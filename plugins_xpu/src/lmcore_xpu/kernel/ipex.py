"""Normalizations by Intel's extension for PyTorch, whose functions have no backward pass.

Theirs is the forward pass alone; the gradient is computed here, from the input.

Shapes: B batch, S sequence, R rows (B*S), H hidden.
"""

from __future__ import annotations

from typing import Any

import intel_extension_for_pytorch as extension
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["layer_norm", "rms_norm"]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x_RH, weight_H, bias_H)
        ctx.epsilon = epsilon
        function = extension.llm.functional.fast_layer_norm
        return function(x_RH, tuple(weight_H.shape), weight_H, bias_H, epsilon)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weight_H, bias_H = ctx.saved_tensors
        wide_RH = x_RH.float()
        variance_R1, mean_R1 = torch.var_mean(wide_RH, dim=-1, correction=0, keepdim=True)
        grads: tuple[Tensor, ...] = torch.ops.aten.native_layer_norm_backward(
            grad_RH.contiguous(),
            x_RH,
            weight_H.shape,
            mean_R1,
            torch.rsqrt(variance_R1 + ctx.epsilon),
            weight_H,
            bias_H,
            [True, True, True],
        )
        return (*grads, None)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x_RH, weight_H)
        ctx.epsilon = epsilon
        return extension.llm.functional.rms_norm(x_RH, weight_H, epsilon)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weight_H = ctx.saved_tensors
        wide_RH, given_RH = x_RH.float(), grad_RH.float()
        scale_R1 = torch.rsqrt(wide_RH.square().mean(dim=-1, keepdim=True) + ctx.epsilon)
        normal_RH = wide_RH * scale_R1
        inner_RH = given_RH * weight_H.float()
        along_R1 = (inner_RH * normal_RH).mean(dim=-1, keepdim=True)
        grad_x_RH = (inner_RH - normal_RH * along_R1) * scale_R1
        grad_weight_H = (given_RH * normal_RH).sum(dim=0)
        return grad_x_RH.to(x_RH.dtype), grad_weight_H.to(weight_H.dtype), None


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    out_RH: Tensor = _LayerNorm.apply(_rows(x_BSH, weight_H), weight_H, bias_H, epsilon)  # type: ignore[no-untyped-call]
    return out_RH.view(x_BSH.shape).to(x_BSH.dtype)


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    out_RH: Tensor = _RMSNorm.apply(_rows(x_BSH, weight_H), weight_H, epsilon)  # type: ignore[no-untyped-call]
    return out_RH.view(x_BSH.shape).to(x_BSH.dtype)


def _rows(x_BSH: Tensor, weight_H: Tensor) -> Tensor:
    """Return x as contiguous rows, in the gain's dtype: the kernels read both in one dtype."""
    return x_BSH.reshape(-1, x_BSH.shape[-1]).to(weight_H.dtype).contiguous()
