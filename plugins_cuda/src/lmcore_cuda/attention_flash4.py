"""Attention by flash-attn, version 4, which is written in CuTe's Python: `flash_attn.cute`.

It takes [B, S, N, D]; a view with two dims exchanged is passed, not a copy.  Its causal triangle
ends at the last key, as the op's does.

Shapes: B batch, S queries, T keys, N heads, K key/value heads, D head channels.
"""

from __future__ import annotations

from flash_attn.cute import flash_attn_func
from torch import Tensor

from lmcore_cuda import attention_sdpa

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
    """Softmax attention; a mask, dropout and single precision, which it lacks, go torch's way."""
    if mask is not None or dropout or q_BNSD.dtype not in attention_sdpa.HALF:
        return attention_sdpa.attention(
            q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout, mask=mask
        )
    found = flash_attn_func(
        q_BNSD.transpose(1, 2), k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2), causal=causal
    )
    # It returns (out, logsumexp), the second being None unless it is asked for.
    out_BSND: Tensor = found[0] if isinstance(found, tuple) else found
    return out_BSND.transpose(1, 2)
