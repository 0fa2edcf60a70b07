"""Limits of this host for collectives: open files, shared memory, the kernel; torch-free."""

from __future__ import annotations

import platform
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmcore_xpu.detection.facts import has_slingshot

__all__ = ["Host", "foreign_runtime", "read_host"]

_SHARED = "dev/shm"
_RUNTIME = "libsycl.so*"


@dataclass(frozen=True)
class Host:
    """Limits and facts of the host.

    Attributes:
        open_files: Largest number of open files of a process; -1: no limit.
        shared_memory: Bytes of /dev/shm; None if there is none.
        kernel: Major and minor version of Linux; (0, 0) if unknown.
        slingshot: True if it has a card of that network.
    """

    open_files: int
    shared_memory: int | None
    kernel: tuple[int, int]
    slingshot: bool


def read_host(root: Path = Path("/")) -> Host:
    """Return limits and facts of this host; *root* is the prefix of every path."""
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        shared: int | None = shutil.disk_usage(root / _SHARED).total
    except OSError:
        shared = None
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    kernel = (int(found[1]), int(found[2])) if found else (0, 0)
    return Host(open_files, shared, kernel, has_slingshot(root))


def foreign_runtime(env: Mapping[str, str]) -> str | None:
    """Return the folder of `LD_LIBRARY_PATH` with a SYCL runtime that is found before torch's.

    PyTorch's wheels bring the runtime that they were built with.
    """
    folders = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return next((folder for folder in folders if any(Path(folder).glob(_RUNTIME))), None)
