"""Attention by the package flash-attn, version 2, which takes [B, S, N, D].

A view with two dims exchanged is passed, not a copy: the kernel only needs a head's channels
to be contiguous.  Its causal triangle ends at the last key, as the op's does.

Shapes: B batch, S queries, T keys, N heads, K key/value heads, D head channels.
"""

from __future__ import annotations

import torch
from flash_attn import flash_attn_func
from torch import Tensor

from lmcore_cuda.attention import sdpa

__all__ = ["attention"]


def attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention; use torch's for a mask or float32."""
    if mask is not None or q_BNSD.dtype not in sdpa.HALF:
        return sdpa.attention(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout, mask=mask)
    out_BSND: Tensor = flash_attn_func(
        q_BNSD.transpose(1, 2),
        k_BKTD.transpose(1, 2),
        v_BKTD.transpose(1, 2),
        dropout_p=dropout,
        causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out_BSND.transpose(1, 2)
