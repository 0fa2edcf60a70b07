"""Attention by torch's `scaled_dot_product_attention`, with shared keys expanded if necessary.

Without gradients oneDNN does keys and values that several query heads share.  With gradients it is
not asked, and of the other kernels not all take them; what torch falls back to keeps a matrix of
scores for each head.  They are written out first there, one for each query head.

Shapes: B batch, S queries, T keys, N heads, K key/value heads, D head channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmcore.contract.op import torch_kernels

__all__ = ["attention"]


def attention(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, **options: Any) -> Tensor:
    """Compute softmax attention by the backend that torch chooses, equal to the reference."""
    trained = torch.is_grad_enabled() and (q_BNSD.requires_grad or k_BKTD.requires_grad)
    attend = torch_kernels.attention_expanded if trained else torch_kernels.attention
    return attend(q_BNSD, k_BKTD, v_BKTD, **options)
