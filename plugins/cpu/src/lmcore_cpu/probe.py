"""Probe of the host: its cores and memory for this process; torch-free."""

from __future__ import annotations

import platform

from lmcore.base.errors import counted
from lmcore.contract import Probe, ProbeState
from lmcore_cpu.host import cpu_count, cpu_name, memory_limit

__all__ = ["probe"]


def probe() -> Probe:
    """Return the CPU as a device that is always present, with the lowest priority."""
    count, memory = cpu_count(), memory_limit()
    cores = f"{counted(count, 'core')} for this process"
    return Probe(
        device_type="cpu",
        state=ProbeState.PRESENT,
        count=1,
        priority=0,
        evidence=(f"{cpu_name()}: {cores}, {memory / 2**30:.1f} GiB",),
        facts={"cores": count, "memory_bytes": memory, "machine": platform.machine()},
    )
