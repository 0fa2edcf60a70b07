"""Health of a GPU during a run, from NVML: lost, uncorrectable errors of memory, rows used up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from lmcore.base.errors import counted
from lmcore_cuda.driver.nvml import Nvml, NvmlError

__all__ = ["health_of"]

_LOST, _RESET_REQUIRED = 15, 16
_UNCORRECTED, _SINCE_RESET = 1, 0
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC."""


def health_of(library: Any, uuid: str) -> Callable[[], str | None] | None:
    """Return the health check of a GPU or a part of one; None if NVML cannot tell.

    Args:
        library: Library from `nvml.load_library`.
        uuid: "GPU-..." or "MIG-...".
    """
    if library is None:
        return None
    try:
        before = _read(library, uuid)[0]
    except NvmlError:
        return None

    def check() -> str | None:
        try:
            errors, exhausted = _read(library, uuid)
        except NvmlError as error:
            lost = error.status in {_LOST, _RESET_REQUIRED}
            return f"the driver has lost the GPU: {error.message}" if lost else None
        if errors > before:
            found = counted(errors - before, "uncorrectable error")
            return f"{found} of its memory since the run began"
        return "its memory has no spare rows left for faulty ones" if exhausted else None

    return check


def _read(library: Any, uuid: str) -> tuple[int, bool]:
    """Return the uncorrectable errors since the GPU's reset, and True if a row had no spare.

    Raises:
        NvmlError: The GPU does not answer.
    """
    with Nvml.opened(library) as nvml:
        handle = nvml.handle("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()))
        return _errors(nvml, handle), _is_exhausted(nvml, handle)


def _errors(nvml: Nvml, handle: ctypes.c_void_p) -> int:
    """Return the errors; 0 for a GPU that does not count them, as one without ECC.

    Raises:
        NvmlError: The GPU is lost.
    """
    count = ctypes.c_ulonglong()
    kind = ctypes.c_uint(_UNCORRECTED), ctypes.c_uint(_SINCE_RESET)
    try:
        nvml.call("nvmlDeviceGetTotalEccErrors", handle, *kind, ctypes.byref(count))
    except NvmlError as error:
        if error.status in {_LOST, _RESET_REQUIRED}:
            raise
    return count.value


def _is_exhausted(nvml: Nvml, handle: ctypes.c_void_p) -> bool:
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    try:
        nvml.call("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
    except NvmlError:  # older GPUs have no spare rows
        return False
    return rows[3].value != 0
