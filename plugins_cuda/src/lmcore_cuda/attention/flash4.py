"""Attention by flash-attn, version 4, which is written in CuTe's Python: `flash_attn.cute`."""

from __future__ import annotations

from flash_attn.cute import flash_attn_func

from lmcore_cuda.attention.flash import op_of

__all__ = ["attention"]

attention = op_of(flash_attn_func)
