"""Stand-in for flash-attn-4 4.0.0b36; there is no `flash_attn/__init__.py` in that package."""

from .interface import flash_attn_func

__all__ = ["flash_attn_func"]
