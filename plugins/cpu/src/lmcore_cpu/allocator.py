"""Keep the C library's allocator from giving a step's memory back to the system.

By default each tensor above 32 MB is mapped afresh and unmapped when freed, so that every step
faults its pages in again: for a small model with a large vocabulary that is a good part of a
step.  Here freed memory stays with the process; the peak is the same.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# Numbers of glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER_TRIM = -1  # read as an unsigned size: the largest one


def keep_freed_memory() -> bool:
    """Configure the allocator of this process; return True if it accepted the setting.

    Another C library than glibc has no `mallopt`; then nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))
