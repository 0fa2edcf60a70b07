"""RMS norm and rotary embedding by the operators of Intel's extension for PyTorch.

The operators have no backward pass, and raise no error in one: gradients would silently be missing.
The gradient of a rotation is the rotation by the negative angle; the gradient of RMS norm is
computed here, in closed form.

Shapes: B batch, S sequence, N heads, D head channels, R rotated pairs, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmcore_cpu.ipex import load_operators
from lmcore_cpu.kernel.rms_norm import gradients, inverse_rms

__all__ = ["rms_norm", "rotary_embedding"]

load_operators()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        x_BSH, weight_H = x_BSH.contiguous(), weight_H.contiguous()  # the operator ignores strides
        ctx.save_for_backward(x_BSH, weight_H)
        ctx.epsilon = epsilon
        out_BSH: Tensor = torch.ops.torch_ipex.rmsnorm(x_BSH, weight_H, epsilon)
        return out_BSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BSH, weight_H = ctx.saved_tensors
        scale_BS1 = inverse_rms(x_BSH.float(), ctx.epsilon)
        return (*gradients(grad_BSH, x_BSH, weight_H, scale_BS1), None)


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain, in at least float32."""
    return _RMSNorm.apply(x_BSH, weight_H, epsilon)  # type: ignore[no-untyped-call,no-any-return]


def _turn(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate each pair by its angle."""
    batch, heads, length, channels = x_BNSD.shape
    pairs = cos_SR.shape[-1]
    sin_cos_S2R = torch.cat((sin_SR, cos_SR), 1).float()
    positions_BS = torch.arange(length).expand(batch, length).contiguous()
    out_BSND, _, _ = torch.ops.torch_ipex.rotary_position_embedding(
        x_BNSD.transpose(1, 2).contiguous(),
        sin_cos_S2R,
        positions_BS,
        heads,
        channels,
        pairs,
        2 * pairs,
    )
    rotated_BNSD: Tensor = out_BSND.transpose(1, 2)
    return rotated_BNSD


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SR, sin_SR)
        return _turn(x_BNSD, cos_SR, sin_SR)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor, None, None]:
        cos_SR, sin_SR = ctx.saved_tensors
        return _turn(grad_BNSD, cos_SR, -sin_SR), None, None


def rotary_embedding(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate channel i and channel i + R by the angle of the position, for i < R; R <= D / 2."""
    return _Rotation.apply(x_BNSD, cos_SR, sin_SR)  # type: ignore[no-untyped-call,no-any-return]
