"""The memory that a process on the host may use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lmcore.contract.memory_stats import MemoryStats
from lmcore.runtime.host_memory import memory_of_host, memory_of_process

GIB = 2**30


def device(kind: str, total: int | None) -> Any:
    """Return a device with so much memory; None: it does not tell."""
    stats = MemoryStats(allocated=1, peak_allocated=1, reserved=1, total=total)
    return SimpleNamespace(type=kind, memory_stats=lambda: stats)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit is the process's, swap space is added, and other devices have none."""
    monkeypatch.setattr("lmcore.runtime.host_memory.host_memory", lambda: 8 * GIB)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=GIB))
    assert memory_of_host() == 9 * GIB
    assert memory_of_process(device("cpu", 2 * GIB)) == 3 * GIB
    assert memory_of_process(device("cpu", None)) == 9 * GIB
    assert memory_of_process(SimpleNamespace(type="cpu", memory_stats=None)) == 9 * GIB  # type: ignore[arg-type]
    assert memory_of_process(device("chip", 2 * GIB)) is None


def test_unknown_swap_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that does not tell its swap space counts as one without."""

    def fail() -> None:
        raise OSError("no /proc/meminfo")

    monkeypatch.setattr("lmcore.runtime.host_memory.host_memory", lambda: 8 * GIB)
    monkeypatch.setattr(psutil, "swap_memory", fail)
    assert memory_of_host() == 8 * GIB
