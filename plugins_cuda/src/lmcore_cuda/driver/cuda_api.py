"""The driver's compute library, used if its management library (NVML) is not installed.

Containers may have the one without the other.  `cuInit` makes no context on a GPU, but takes a
third of a second and cannot be undone: a probe, whose process ends, may call it.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from lmcore_cuda.driver.nvml import DriverReport, Gpu

__all__ = ["load_driver", "read_compute_driver"]

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NAME_BYTES = 256
_NO_DEVICE = 100


def load_driver() -> Any:
    """Return the driver's compute library, or None if it is not installed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


class _CudaError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def read_compute_driver(library: Any, missing: str) -> DriverReport:
    """Return the GPUs that CUDA shows this process.

    Args:
        library: Library from `load_driver`; None if there is none.
        missing: Message about the missing management library.
    """
    if library is None:
        return DriverReport(library=False, message=missing)
    try:
        _call(library, "cuInit", ctypes.c_uint(0))
        version, count = ctypes.c_int(), ctypes.c_int()
        _call(library, "cuDriverGetVersion", ctypes.byref(version))
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        gpus = tuple(_gpu(library, index) for index in range(count.value))
    except _CudaError as error:
        if error.status == _NO_DEVICE:
            return DriverReport(library=True, message=missing, already_visible=True)
        return DriverReport(
            library=True,
            status=error.status,
            message=f"{_words(library, error.status)}; {missing}",
            already_visible=True,
        )
    return DriverReport(
        library=True,
        message=missing,
        cuda=(version.value // 1000, version.value % 1000 // 10),
        gpus=gpus,
        already_visible=True,
    )


def _call(library: Any, function: str, *arguments: Any) -> None:
    status = getattr(library, function)(*arguments)
    if status:
        raise _CudaError(status)


def _words(library: Any, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
    return text.value.decode(errors="replace") if text.value else f"CUDA error {status}"


def _gpu(library: Any, index: int) -> Gpu:
    device = ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(library, "cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
    memory = ctypes.c_size_t()
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    raw = (ctypes.c_ubyte * 16)()
    _call(library, "cuDeviceGetUuid", raw, device)
    major, minor = (_attribute(library, attribute, device) for attribute in (_MAJOR, _MINOR))
    return Gpu(
        index,
        name.value.decode(errors="replace"),
        f"GPU-{uuid.UUID(bytes=bytes(raw))}",
        memory.value,
        capability=(major, minor),
    )


def _attribute(library: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _call(library, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
    return value.value
