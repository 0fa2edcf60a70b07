"""Attention by torch's `scaled_dot_product_attention`, whose backends torch chooses among.

torch's order is flash (8.0 and newer, half precision, no mask), memory-efficient, math; on 9.0 and
10.0 cuDNN is first if its version is recent enough.  Two cases need care:

- torch lines the causal triangle up with the first key.  With fewer queries than keys (a cache, a
  part of a sequence) it has to end at the last one.
- Shared keys and values are native to flash and cuDNN alone.  For the memory-efficient kernel they
  are written out, N / K times; otherwise torch would fall back to a full matrix of scores.

Shapes: B batch, S queries, T keys, N heads, K key/value heads, D head channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from lmcore.contract.op import torch_kernels
from lmcore.contract.op.torch_kernels import attention_expanded

__all__ = ["HALF", "attention", "attention_cudnn", "attention_expanded", "attention_flash"]

HALF = (torch.bfloat16, torch.float16)


def attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention by the backend that torch chooses, equal to the reference."""
    if mask is not None or q_BNSD.dtype not in HALF:
        return attention_expanded(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout, mask=mask)
    return _attend(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout)


def attention_cudnn(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, **options: Any) -> Tensor:
    """Compute the same with cuDNN first, whatever torch's order; other backends follow."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        return attention(q_BNSD, k_BKTD, v_BKTD, **options)


def attention_flash(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the same with torch's flash backend, for the cases that it supports."""
    if mask is not None or dropout or q_BNSD.dtype not in HALF:
        return attention(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout, mask=mask)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return _attend(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout)


def _attend(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, causal: bool, dropout: float
) -> Tensor:
    """Attend without a mask tensor; torch has a name for the triangle that ends at the last key."""
    queries, keys = q_BNSD.shape[-2], k_BKTD.shape[-2]
    if not (causal and 1 < queries < keys and q_BNSD.is_cuda):
        return torch_kernels.attention(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout)
    return functional.scaled_dot_product_attention(
        q_BNSD,
        k_BKTD,
        v_BKTD,
        attn_mask=causal_lower_right(queries, keys),
        dropout_p=dropout,
        enable_gqa=q_BNSD.shape[1] != k_BKTD.shape[1],
    )
