"""torch's attention with flash-attn 3 or 4 in the place of its own flash kernel.

torch puts the package's kernels behind its own flash operator, for the whole process, and so they
stay a part of a compiled block, which the package's own function would cut.  It is done when the
kernel is loaded, which is when it is bound: `lmcore_cuda.attention.table` offers it where it fits.
"""

from __future__ import annotations

from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from lmcore_cuda.attention.sdpa import attention_flash

__all__: list[str] = []  # `flash3` and `flash4` come into being when they are asked for

_IMPLS = {"flash3": "FA3", "flash4": "FA4"}


def __getattr__(name: str) -> object:
    """Put a version in its place and return the kernel: what loading `flash3` or `flash4` does."""
    if name not in _IMPLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if current_flash_attention_impl() != _IMPLS[name]:
        activate_flash_attention_impl(_IMPLS[name])
    return attention_flash
