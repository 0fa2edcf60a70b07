"""Memory that a process on the host may use, before the system ends it without a message."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lmcore.base.errors import host_memory

if TYPE_CHECKING:
    from lmcore.contract.device import Device

__all__ = ["memory_of_host", "memory_of_process"]


def memory_of_host() -> int:
    """Return the memory of the host in bytes, swap space included."""
    return host_memory() + _swap_space()


def memory_of_process(device: Device) -> int | None:
    """Return the bytes that a process may use on its device, swap space included.

    None for a device beside the host: an allocation that does not fit there raises an error.

    Args:
        device: Device of this process.
    """
    if device.type != "cpu":
        return None
    total = device.memory_stats().total if device.memory_stats is not None else None
    return memory_of_host() if total is None else min(total + _swap_space(), memory_of_host())


def _swap_space() -> int:
    import psutil  # takes 6 ms

    with contextlib.suppress(OSError, RuntimeError, RuntimeWarning):
        size: int = psutil.swap_memory().total
        return size
    return 0
