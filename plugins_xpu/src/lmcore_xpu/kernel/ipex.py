"""Norms, rotary embedding and SwiGLU by Intel's extension for PyTorch (IPEX).

IPEX's functions have no backward pass on a GPU, and raise no error in one: gradients would silently
be missing.  They are computed here, from the input; the gradient of a rotation is the rotation by
the negative angle.  Only `intel_extension_for_pytorch.llm.functional` is called, whose functions
choose the kernel by the device of their inputs.  Tensors without elements, for which its layer norm
fails on a CPU, are left to the references.  Its norms ignore the strides of gains.

Shapes: B batch, S sequence, N heads, D head channels, R rotated pairs, or rows of a norm (B*S),
H hidden, F feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch
from intel_extension_for_pytorch.llm import functional as ipex
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lmcore.contract.op import reference

__all__ = ["layer_norm", "rms_norm", "rotary_embedding", "swiglu"]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x_RH, weight_H, bias_H)
        ctx.epsilon = epsilon
        shape = tuple(weight_H.shape)
        return ipex.fast_layer_norm(x_RH, shape, weight_H, bias_H, epsilon)  # type: ignore[no-any-return]

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
        return ipex.rms_norm(x_RH, weight_H, epsilon)  # type: ignore[no-any-return]

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


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SR, sin_SR)
        return _rotate(x_BNSD, cos_SR, sin_SR)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor, None, None]:
        cos_SR, sin_SR = ctx.saved_tensors
        return _rotate(grad_BNSD, cos_SR, -sin_SR), None, None


def _rotate(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate each pair of channels by its angle, in a copy."""
    heads, length, rotated = x_BNSD.shape[1], x_BNSD.shape[2], 2 * cos_SR.shape[-1]
    x_BSND = x_BNSD.transpose(1, 2)
    out_BSND = x_BSND[..., :rotated].clone(memory_format=torch.contiguous_format)
    # IPEX rotates a query and a key in place.  The key here is a buffer whose result is
    # dropped; with another number of heads than the query's it may have another batch size.
    unused = out_BSND.new_empty(1, length, 2 if heads == 1 else 1, rotated)
    cos_S1D = torch.cat((cos_SR, cos_SR), -1).float().unsqueeze(1)
    sin_S1D = torch.cat((sin_SR, sin_SR), -1).float().unsqueeze(1)
    ipex.rotary_embedding(out_BSND, unused, sin_S1D, cos_S1D, rotated, True)  # noqa: FBT003
    if rotated < x_BSND.shape[-1]:
        out_BSND = torch.cat((out_BSND, x_BSND[..., rotated:]), -1)
    return out_BSND.transpose(1, 2)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BS2F: Tensor) -> Tensor:
        ctx.save_for_backward(x_BS2F)
        gate_BSF, up_BSF = x_BS2F.chunk(2, dim=-1)
        out_BSF = torch.empty_like(gate_BSF, memory_format=torch.contiguous_format)
        ipex.silu_mul(gate_BSF, up_BSF, out_BSF)
        return out_BSF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> Tensor:
        (x_BS2F,) = ctx.saved_tensors
        gate_BSF, up_BSF = x_BS2F.chunk(2, dim=-1)
        grad_gate_BSF = torch.ops.aten.silu_backward(grad_BSF * up_BSF, gate_BSF)
        return torch.cat((grad_gate_BSF, grad_BSF * functional.silu(gate_BSF)), -1)


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    if not x_BSH.numel():
        return reference.layer_norm(x_BSH, weight_H, bias_H, epsilon)
    x_RH, weight_H, bias_H = _rows(x_BSH, weight_H), weight_H.contiguous(), bias_H.contiguous()
    out_RH: Tensor = _LayerNorm.apply(x_RH, weight_H, bias_H, epsilon)  # type: ignore[no-untyped-call]
    return out_RH.view(x_BSH.shape).to(x_BSH.dtype)


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    if not x_BSH.numel():
        return reference.rms_norm(x_BSH, weight_H, epsilon)
    x_RH, weight_H = _rows(x_BSH, weight_H), weight_H.contiguous()
    out_RH: Tensor = _RMSNorm.apply(x_RH, weight_H, epsilon)  # type: ignore[no-untyped-call]
    return out_RH.view(x_BSH.shape).to(x_BSH.dtype)


def rotary_embedding(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate channel i and channel i + R by the angle of the position, for i < R; R <= D / 2."""
    if not x_BNSD.numel():
        return reference.rotary_embedding(x_BNSD, cos_SR, sin_SR)
    return _Rotation.apply(x_BNSD, cos_SR, sin_SR)  # type: ignore[no-untyped-call,no-any-return]


def swiglu(x_BS2F: Tensor) -> Tensor:
    """Return silu(gate) * up; the last dim holds gate, then up."""
    if not x_BS2F.numel():
        return reference.swiglu(x_BS2F)
    return _SwiGLU.apply(x_BS2F)  # type: ignore[no-untyped-call,no-any-return]


def _rows(x_BSH: Tensor, weight_H: Tensor) -> Tensor:
    """Return x as contiguous rows, in the gain's dtype: the kernels read both in one dtype."""
    return x_BSH.reshape(-1, x_BSH.shape[-1]).to(weight_H.dtype).contiguous()
