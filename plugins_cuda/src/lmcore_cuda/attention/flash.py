"""Common part of the kernels of flash-attn 3 and 4: adapts the package's call to the op's.

They take [B, S, N, D]; views with two dims exchanged are passed, not copies.  Their causal triangle
ends at the last key, as the op's does.

Shapes: B batch, S queries, T keys, N heads, K key/value heads, D head channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lmcore_cuda.attention import sdpa

__all__ = ["op_of"]


def op_of(flash_attn_func: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the op `attention` by a package's function.

    Args:
        flash_attn_func: Package's function; returns the output, or a tuple that begins with it.
    """

    def attention(
        q_BNSD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        *,
        causal: bool,
        dropout: float = 0.0,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax attention; use torch's for a mask, dropout or float32."""
        if mask is not None or dropout or q_BNSD.dtype not in sdpa.HALF:
            return sdpa.attention(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout, mask=mask)
        views = (tensor.transpose(1, 2) for tensor in (q_BNSD, k_BKTD, v_BKTD))
        found = flash_attn_func(*views, causal=causal)
        out_BSND: Tensor = found[0] if isinstance(found, tuple) else found
        return out_BSND.transpose(1, 2)

    return attention
