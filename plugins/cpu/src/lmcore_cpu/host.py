"""Facts of the host that need no torch: processors, memory limits, compiler."""

from __future__ import annotations

import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path

__all__ = [
    "CPUINFO",
    "cpp_compiler",
    "cpu_count",
    "cpu_name",
    "memory_available",
    "memory_limit",
    "processor_field",
]

CPUINFO = Path("/proc/cpuinfo")
"""File with the features of the processor."""
_CGROUP = Path("/sys/fs/cgroup")


def cpu_count() -> int:
    """Return how many cores this process may run on, its affinity and quota considered."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    quota = _read_words(_CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        count = min(count, max(1, round(int(quota[0]) / int(quota[1]))))
    return count


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name as its maker gives it."""
    name = " ".join(processor_field("model name", cpuinfo).split())
    return name or platform.processor() or platform.machine() or "unknown processor"


def processor_field(name: str, cpuinfo: Path = CPUINFO) -> str:
    """Return a field of the first processor; "" if it is unknown."""
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name and value.strip():
                return value.strip()
    return ""


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the host's, or its container's."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_words(_CGROUP / "memory.max")
    return min(total, int(limit[0])) if limit and limit[0].isdigit() else total


def memory_available() -> int:
    """Return the bytes of memory that are free for this process."""
    import psutil  # takes 6 ms

    available: int = psutil.virtual_memory().available
    limit, used = _read_words(_CGROUP / "memory.max"), _read_words(_CGROUP / "memory.current")
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        available = min(available, max(0, int(limit[0]) - int(used[0])))
    return available


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile would start, or None."""
    candidates = [os.environ.get("CXX", ""), "g++", "clang++"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
