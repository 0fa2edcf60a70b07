"""Memory of the test's own process, by its kind of pages."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["huge_page_bytes"]

_HUGE_PAGES = " hg"


def huge_page_bytes() -> int:
    """Return the bytes of memory for which huge pages were asked; on Linux."""
    content = Path("/proc/self/smaps").read_text("utf-8")
    sizes = re.findall(r"^Size:\s+(\d+) kB$", content, re.MULTILINE)
    flags = re.findall(r"^VmFlags:(.*)$", content, re.MULTILINE)
    return sum(
        1024 * int(size) for size, flag in zip(sizes, flags, strict=True) if _HUGE_PAGES in flag
    )
