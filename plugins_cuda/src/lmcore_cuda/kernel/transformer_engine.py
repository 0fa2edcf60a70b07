"""Normalizations by Transformer Engine: the compiled functions that its own modules call.

Shapes: B batch, S sequence, R rows (B*S), H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_engine.pytorch.constants import TE_DType  # isort: skip
import transformer_engine_torch as engine  # isort: skip - the package above loads it from its folder

__all__ = ["layer_norm", "rms_norm"]

_ALL_PROCESSORS = 0
_GAIN_AS_IT_IS = False


def _rows(x_BSH: Tensor, like: Tensor) -> Tensor:
    """Return x as the kernels need it: two dims, contiguous, of the gain's dtype."""
    return x_BSH.to(like.dtype).reshape(-1, x_BSH.shape[-1]).contiguous()


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
        found = engine.layernorm_fwd(
            x_RH,
            weight_H,
            bias_H,
            epsilon,
            None,
            None,
            TE_DType[x_RH.dtype],
            _ALL_PROCESSORS,
            _GAIN_AS_IT_IS,
        )
        out_RH, mean_R, scale_R = found
        ctx.save_for_backward(x_RH, weight_H, mean_R, scale_R)
        return out_RH  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weight_H, mean_R, scale_R = ctx.saved_tensors
        grads = engine.layernorm_bwd(
            *(grad_RH.contiguous(), x_RH, mean_R, scale_R, weight_H),
            *(_ALL_PROCESSORS, _GAIN_AS_IT_IS),
        )
        return (*grads, None)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        found = engine.rmsnorm_fwd(
            x_RH,
            weight_H,
            epsilon,
            None,
            None,
            TE_DType[x_RH.dtype],
            _ALL_PROCESSORS,
            _GAIN_AS_IT_IS,
        )
        out_RH, _, scale_R = found
        ctx.save_for_backward(x_RH, weight_H, scale_R)
        return out_RH  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weight_H, scale_R = ctx.saved_tensors
        grads = engine.rmsnorm_bwd(
            grad_RH.contiguous(), x_RH, scale_R, weight_H, _ALL_PROCESSORS, _GAIN_AS_IT_IS
        )
        return (*grads, None)


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    out_RH: Tensor = _LayerNorm.apply(_rows(x_BSH, weight_H), weight_H, bias_H, epsilon)  # type: ignore[no-untyped-call]
    return out_RH.view(x_BSH.shape).to(x_BSH.dtype)


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    out_RH: Tensor = _RMSNorm.apply(_rows(x_BSH, weight_H), weight_H, epsilon)  # type: ignore[no-untyped-call]
    return out_RH.view(x_BSH.shape).to(x_BSH.dtype)
