"""Attention of torch with flash-attn 3 or 4 in place of torch's flash kernel.

torch registers the package's kernels for its own flash operator, for the whole process, so they
are part of a compiled block; the package's own function would break its graph.  Loading the kernel
registers them, when it is bound: `lmcore_cuda.attention.table` offers it if it fits.
"""

from __future__ import annotations

from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from lmcore_cuda.attention.sdpa import attention_flash

__all__: list[str] = []  # `flash3` and `flash4` come into being when they are asked for

_IMPLS = {"flash3": "FA3", "flash4": "FA4"}


def __getattr__(name: str) -> object:
    """Register a version and return the kernel; loading `flash3` or `flash4` calls this."""
    if name not in _IMPLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if current_flash_attention_impl() != _IMPLS[name]:
        activate_flash_attention_impl(_IMPLS[name])
    return attention_flash
