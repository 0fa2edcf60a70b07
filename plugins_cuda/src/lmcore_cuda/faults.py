"""Hints for errors that CUDA reports, by words of their messages; torch-free."""

from __future__ import annotations

import re

from lmcore.contract import hint_by_words

__all__ = ["hint_for", "is_out_of_memory"]

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"error 802|not yet initialized",
        "start `nvidia-fabricmanager`, of the driver's version: GPUs behind NVSwitch need it",
    ),
    (
        r"error 803|unsupported display driver",
        "reboot, so that kernel module and libraries of the driver are of one version",
    ),
    (
        r"error 804|forward compatibility",
        "take the toolkit's folder `compat` out of `LD_LIBRARY_PATH`, or update the driver",
    ),
    (
        r"busy or unavailable|exclusive",
        "another process has the GPU to itself: end it, or run `sudo nvidia-smi -c DEFAULT`",
    ),
    (
        r"error 999|unknown error",
        "load the module `nvidia-uvm` (`sudo nvidia-modprobe -u`); in a container, restart it",
    ),
    (r"no kernel image", "install a torch that is built for this GPU: `lmcore plugins`"),
    (r"not compiled with cuda", "install a torch with CUDA: `lmcore plugins` has the command"),
)


def hint_for(message: str) -> str:
    """Return the hint for an error, from its message."""
    return hint_by_words(message, _HINTS)


def is_out_of_memory(message: str) -> bool:
    """Return True if an error means that a GPU has no memory left."""
    return re.search(r"out of memory|ALLOC_FAILED", message, re.IGNORECASE) is not None
