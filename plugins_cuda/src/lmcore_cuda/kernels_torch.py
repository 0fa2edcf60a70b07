"""Ops by torch's own CUDA kernels under the signatures of the references.

The dtype of a result is that of the op's input, whatever autocast makes of torch's function.

Shapes: B batch, S sequence or queries, T tokens or keys, H hidden, I inputs, O outputs, N heads, D
head channels, R rotated pairs, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.accelerator.torch_kernels import adamw, bias_gelu, cross_entropy, grad_norm

__all__ = [
    "adamw",
    "bias_dropout_add",
    "bias_gelu",
    "cross_entropy",
    "grad_norm",
    "layer_norm",
    "linear",
    "rms_norm",
    "rotary_embedding",
    "scaled_masked_softmax",
    "swiglu",
]


def linear(x_BSI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias by cuBLAS; under autocast in its dtype."""
    return functional.linear(x_BSI, weight_OI, bias_O)


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    wide = _widened(x_BSH, weight_H)
    return functional.layer_norm(wide, weight_H.shape, weight_H, bias_H, epsilon).to(x_BSH.dtype)


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    wide = _widened(x_BSH, weight_H)
    return functional.rms_norm(wide, weight_H.shape, weight_H, epsilon).to(x_BSH.dtype)


def _widened(x_BSH: Tensor, weight_H: Tensor) -> Tensor:
    """Return x in the gain's dtype: the kernels read both as one type."""
    return x_BSH if x_BSH.dtype == weight_H.dtype else x_BSH.to(weight_H.dtype)


def swiglu(x_BS2F: Tensor) -> Tensor:
    """Return silu(gate) * up; the last dim holds gate, then up."""
    gate_BSF, up_BSF = x_BS2F.chunk(2, dim=-1)
    return functional.silu(gate_BSF) * up_BSF


def bias_dropout_add(
    x_BSH: Tensor,
    bias_H: Tensor | None,
    residual_BSH: Tensor,
    *,
    dropout: float,
    training: bool,
) -> Tensor:
    """Return residual + dropout(x + bias), in the residual's dtype."""
    y_BSH = x_BSH if bias_H is None else x_BSH + bias_H.to(x_BSH.dtype)
    y_BSH = functional.dropout(y_BSH, dropout, training=training)
    return residual_BSH + y_BSH.to(residual_BSH.dtype)


def scaled_masked_softmax(x_BNST: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax over the last dim of ``x * scale``; True in *mask* (broadcastable) hides an entry."""
    wide = torch.promote_types(x_BNST.dtype, torch.float32)
    scores = x_BNST.to(wide) * scale
    if mask is None:
        return torch.softmax(scores, dim=-1).to(x_BNST.dtype)
    # The lowest number in place of minus infinity: a row that is hidden whole makes no NaN.
    scores = scores.masked_fill(mask, torch.finfo(wide).min)
    return torch.softmax(scores, dim=-1).masked_fill(mask, 0.0).to(x_BNST.dtype)


def rotary_embedding(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate channel i and channel i + R by the angle of the position, for i < R; R <= D / 2."""
    half = cos_SR.shape[-1]
    wide = x_BNSD.to(torch.promote_types(x_BNSD.dtype, torch.float32))
    first, second, rest = wide.split([half, half, x_BNSD.shape[-1] - 2 * half], dim=-1)
    turned = [first * cos_SR - second * sin_SR, second * cos_SR + first * sin_SR, rest]
    return torch.cat(turned, dim=-1).to(x_BNSD.dtype)
