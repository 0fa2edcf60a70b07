"""Present use of a GPU: its processes, memory, power and slowdowns, from NVML."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore_cuda.driver.nvml import INSUFFICIENT_SIZE, Nvml, NvmlError

__all__ = ["GpuProcess", "GpuUse", "in_gib", "read_use"]

_NOT_AVAILABLE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE: the driver does not know a process's bytes, as on Windows."""
_MOST_PROCESSES = 1024
_SLOWDOWNS = {
    0x04: "the power limit",
    0x08: "a slowdown of the hardware: power supply or heat",
    0x20: "heat",
    0x40: "heat beyond the hardware's limit",
    0x80: "a power brake from outside",
}
"""Reasons that cost speed under load, by bit of `nvmlDeviceGetCurrentClocksThrottleReasons`."""


class ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`, which `_v3` of the function fills too: 24 bytes."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU.

    Attributes:
        pid: Process id; the host's if this process is in a container.
        name: Name of its program; empty if unknown.
        used: Bytes of its memory; None if the driver does not report them.
    """

    pid: int
    name: str
    used: int | None

    def __str__(self) -> str:
        """Return a text: "process 12 (python3): 3.2 GiB"."""
        name = f" ({self.name})" if self.name else ""
        used = f": {in_gib(self.used)}" if self.used is not None else ""
        return f"process {self.pid}{name}{used}"


@dataclass(frozen=True)
class GpuUse:
    """A GPU at this moment.

    Attributes:
        total: Bytes of its memory.
        used: Bytes in use, the driver's included.
        processes: Processes with memory there, the largest first; none if the driver reports none.
        power_limit: Watts that it may draw; None if unknown.
        power_default: Default of that limit.
        slowdowns: Reasons for its reduced clock.
    """

    total: int
    used: int
    processes: tuple[GpuProcess, ...] = ()
    power_limit: float | None = None
    power_default: float | None = None
    slowdowns: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Memory and its users as text."""
        text = f"{in_gib(self.used)} of {in_gib(self.total)} are in use"
        if not self.processes:
            return f"{text}; the driver names no process (in a container it may not)"
        shown = "; ".join(str(process) for process in self.processes[:6])
        more = f"; and {len(self.processes) - 6} more" if len(self.processes) > 6 else ""
        return f"{text}: {shown}{more}"


def in_gib(count: int) -> str:
    """Return a number of bytes as text."""
    return f"{count / 2**30:.1f} GiB"


def read_use(library: Any, uuid: str, proc: Path = Path("/proc")) -> GpuUse | None:
    """Return the present use of a GPU or a part of one; None if NVML does not report it.

    Args:
        library: Library from `nvml.load_library`.
        uuid: "GPU-..." or "MIG-...".
        proc: Folder of the system's process information.
    """
    if library is None:
        return None
    try:
        with Nvml.opened(library) as nvml:
            name = ctypes.c_char_p(uuid.encode())
            handle = nvml.handle("nvmlDeviceGetHandleByUUID", name)
            memory = nvml.memory(handle)
            return GpuUse(
                int(memory.total),
                int(memory.used),
                _processes(nvml, handle, proc),
                _watts(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle),
                _watts(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle),
                _slowdowns(nvml, handle),
            )
    except NvmlError:
        return None


def _processes(nvml: Nvml, handle: ctypes.c_void_p, proc: Path) -> tuple[GpuProcess, ...]:
    found = [
        GpuProcess(
            process.pid,
            _program(nvml, process.pid, proc),
            None if process.used == _NOT_AVAILABLE else int(process.used),
        )
        for process in _running(nvml, handle)
    ]
    return tuple(sorted(found, key=lambda process: -(process.used or 0)))


def _running(nvml: Nvml, handle: ctypes.c_void_p) -> list[ProcessInfo]:
    """Return the driver's records; none if the driver lacks the function."""
    for function in (
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetComputeRunningProcesses_v2",
    ):
        size = 64
        while size <= _MOST_PROCESSES:
            count, records = ctypes.c_uint(size), (ProcessInfo * size)()
            try:
                nvml.call(function, handle, ctypes.byref(count), records)
            except NvmlError as error:
                if error.status != INSUFFICIENT_SIZE:
                    break
                size *= 4
                continue
            return list(records[: min(count.value, size)])
    return []


def _program(nvml: Nvml, pid: int, proc: Path) -> str:
    """Return the name of a process's program, without its folder; empty if unknown."""
    with contextlib.suppress(NvmlError):
        # NVML fills what fits and counts that as success.
        path = nvml.text("nvmlSystemGetProcessName", ctypes.c_uint(pid))
        if path:
            return path.split(" ")[0].rpartition("/")[2]
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _watts(nvml: Nvml, function: str, handle: ctypes.c_void_p) -> float | None:
    try:
        return nvml.number(function, handle) / 1000
    except NvmlError:
        return None


def _slowdowns(nvml: Nvml, handle: ctypes.c_void_p) -> tuple[str, ...]:
    reasons = ctypes.c_ulonglong()
    try:
        nvml.call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
    except NvmlError:
        return ()
    return tuple(reason for bit, reason in _SLOWDOWNS.items() if reasons.value & bit)
