"""Attention by flash-attn, version 3, for Hopper: its module is `flash_attn_interface`."""

from __future__ import annotations

from flash_attn_interface import flash_attn_func

from lmcore_cuda.attention.flash import op_of

__all__ = ["attention"]

attention = op_of(flash_attn_func)
