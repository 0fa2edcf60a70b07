"""GPU architectures of the installed torch's build, without importing it.

A build has machine code for some compute capabilities (`sm_90`), and may have a portable form
(`compute_120`) that the driver compiles for GPUs from that one on.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

__all__ = ["PYTORCH_BUILDS", "capability_words", "read_architectures", "runs_on"]

_LIBRARY = "torch/lib/libtorch_python.so"
_ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_LIST = re.compile(rb"\0((?:(?:sm|compute)_\d{2,3}[af]? )*(?:sm|compute)_\d{2,3}[af]?)\0")
_TURING, _HOPPER = ("sm_75", "sm_80", "sm_86"), ("sm_90",)  # the first: Ampere's, too
_BLACKWELL = ("sm_100", "sm_120")

PYTORCH_BUILDS: Mapping[str, tuple[str, ...]] = {
    "cu130": (*_TURING, *_HOPPER, *_BLACKWELL),
    "cu128": ("sm_70", *_TURING, *_HOPPER, *_BLACKWELL),
    "cu126": ("sm_50", "sm_60", "sm_70", *_TURING, *_HOPPER),
}
"""Architectures of PyTorch's own builds, on x86.

Sources: for torch 2.11 to 2.13 the table of PyTorch's RELEASE.md; for `cu128` the wheels of torch
2.8, 2.9 and 2.10.
"""


def read_architectures(library: Path | None = None) -> tuple[str, ...]:
    """Return what `torch.cuda.get_arch_list` would; empty if it is not found.

    The list is one line of text in torch's library, which is read as a file.

    Args:
        library: That file; default: the installed torch's.
    """
    if library is None:
        try:
            torch = importlib.metadata.distribution("torch")
        except importlib.metadata.PackageNotFoundError:
            return ()
        library = Path(str(torch.locate_file(_LIBRARY)))
    with (
        contextlib.suppress(OSError, ValueError),
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _found(data)
    return ()


def _found(data: mmap.mmap) -> tuple[str, ...]:
    place = data.find(b"sm_")
    while place >= 0:
        # The list may begin with what is not `sm_`; it is short.
        start = data.rfind(b"\0", max(0, place - 256), place)
        found = _LIST.match(data, start) if start >= 0 else None
        if found is not None:
            return tuple(found[1].decode().split(" "))
        place = data.find(b"sm_", place + 3)
    return ()


def runs_on(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Return True if a build runs on GPUs of a compute capability.

    Machine code runs on its own capability and later ones of the same major number; code for
    `sm_90a` on that one only, code for `sm_100f` on its family.  The portable form runs on any
    later one.
    """
    major, minor = capability
    for entry in architectures:
        parts = _ENTRY.fullmatch(entry)
        if parts is None:
            continue
        own = (int(parts[2]), int(parts[3]))
        if parts[4] == "a":
            fits = own == capability
        elif parts[1] == "compute" and not parts[4]:
            fits = own <= capability
        else:
            fits = own[0] == major and own[1] <= minor
        if fits:
            return True
    return False


def capability_words(capabilities: Sequence[tuple[int, int]]) -> str:
    """Return compute capabilities as text: "7.0, 9.0"."""
    return ", ".join(f"{major}.{minor}" for major, minor in sorted(set(capabilities)))
