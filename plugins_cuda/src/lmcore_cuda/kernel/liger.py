"""Ops by the package liger-kernel, whose kernels are written in Triton.

Shapes: B batch, S sequence, R rows (B*S), T tokens, H hidden, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import torch
from liger_kernel.ops import (
    LigerCrossEntropyFunction,
    LigerFusedGateUpSiLUMulFunction,
    LigerFusedLinearCrossEntropyFunction,
    LigerLayerNormFunction,
    LigerRMSNormFunction,
)
from torch import Tensor

__all__ = ["cross_entropy", "layer_norm", "linear_cross_entropy", "rms_norm", "swiglu"]

_IN_FLOAT32 = "gemma"
"""Its name for a normalization that is computed in float32 to the end, as the op's is."""

_NO_TARGET_IGNORED = torch.iinfo(torch.int64).min


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    out: Tensor = LigerLayerNormFunction.apply(x_BSH, weight_H, bias_H, epsilon)
    return out


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    in_place = False  # it would write the result over the gradient that it is given
    out: Tensor = LigerRMSNormFunction.apply(x_BSH, weight_H, epsilon, 0.0, _IN_FLOAT32, in_place)
    return out


def swiglu(x_BS2F: Tensor) -> Tensor:
    """Return silu(gate) * up; the last dim holds gate, then up.

    The function's gradient always has two dims, so its input gets two.
    """
    rows_R2F = x_BS2F.reshape(-1, x_BS2F.shape[-1])
    out_RF: Tensor = LigerFusedGateUpSiLUMulFunction.apply(rows_R2F)
    return out_RF.view(*x_BS2F.shape[:-1], -1)


def cross_entropy(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    """Return the negative log-likelihood of each target, in float32.

    The kernel writes the gradient over its input, so it gets a copy.
    """
    copy_TV = logits_TV.to(torch.float32, copy=True)
    loss_T: Tensor = LigerCrossEntropyFunction.apply(
        copy_TV, target_T, None, _NO_TARGET_IGNORED, 0.0, 0.0, "none"
    )[0]
    return loss_T


def linear_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, loss_weight_T: Tensor
) -> Tensor:
    """Return the sum of loss_weight times the cross entropy of hidden @ weight.T."""
    narrow = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    dtype = narrow or torch.promote_types(hidden_TH.dtype, weight_VH.dtype)
    loss_T: Tensor = LigerFusedLinearCrossEntropyFunction.apply(
        hidden_TH.to(dtype),
        weight_VH.to(dtype),
        target_T,
        None,
        None,
        _NO_TARGET_IGNORED,
        0.0,
        0.0,
        "none",
    )[0]
    return (loss_T.float() * loss_weight_T).sum()
