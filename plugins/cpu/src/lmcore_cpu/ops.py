"""Kernels for the CPU: torch's fused functions under the signatures of the ops' references.

Shapes: B batch, S queries, T keys, H hidden, N heads, K key/value heads, D head channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.accelerator.torch_kernels import adamw, bias_gelu, cross_entropy, grad_norm

__all__ = [
    "adamw",
    "attention",
    "bias_gelu",
    "cross_entropy",
    "grad_norm",
    "layer_norm",
]


def attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention by torch's fused kernel; as the reference, also where S differs from T."""
    queries, keys = q_BNSD.shape[-2], k_BKTD.shape[-2]
    # torch lines the causal triangle up with the first key; with a cache it belongs at the last.
    square = causal and mask is None and queries == keys
    visible = None if mask is None else ~mask
    if causal and not square and queries > 1:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q_BNSD.device)
        earlier = ones.tril(diagonal=keys - queries)
        visible = earlier if visible is None else visible & earlier
    return functional.scaled_dot_product_attention(
        q_BNSD,
        k_BKTD,
        v_BKTD,
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=square,
        enable_gqa=q_BNSD.shape[1] != k_BKTD.shape[1],
    )


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    return functional.layer_norm(x_BSH, weight_H.shape, weight_H, bias_H, epsilon)
