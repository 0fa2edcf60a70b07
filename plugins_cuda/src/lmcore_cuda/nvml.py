"""What the driver says through its management library (NVML), which makes no context on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

__all__ = ["DRIVER_NOT_LOADED", "DriverReport", "Gpu", "read_driver"]

LIBRARY = "libnvidia-ml.so.1"
DRIVER_NOT_LOADED = 9
_SUCCESS = 0
_FUNCTION_NOT_FOUND = 13
_TEXT_BYTES = 96


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver lists it: its index there, name, UUID and bytes of memory."""

    index: int
    name: str
    uuid: str
    memory: int


@dataclass(frozen=True)
class DriverReport:
    """What NVML said.

    Attributes:
        library: Whether the library is installed.
        status: NVML's status of the first call that failed; 0 when all went well.
        message: That status in the driver's words.
        version: Version of the driver.
        cuda: Highest CUDA version that the driver can run, (major, minor).
        gpus: All GPUs that this process may see, in the order of the PCI bus.
    """

    library: bool
    status: int = _SUCCESS
    message: str = ""
    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = ()


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _CallError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def load_library() -> Any:
    """Return the driver's management library, or None where it is not installed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def read_driver(library: Any) -> DriverReport:
    """Return what *library* (from `load_library`) reports; never raises for what it answers."""
    if library is None:
        return DriverReport(library=False, message=f"`{LIBRARY}` is not installed")
    try:
        _call(library, "nvmlInit_v2")
    except _CallError as error:
        return _failure(library, error)
    try:
        return DriverReport(
            library=True,
            version=_text(library, "nvmlSystemGetDriverVersion"),
            cuda=_cuda_version(library),
            gpus=_gpus(library),
        )
    except _CallError as error:
        return _failure(library, error)
    finally:
        library.nvmlShutdown()


def _failure(library: Any, error: _CallError) -> DriverReport:
    library.nvmlErrorString.restype = ctypes.c_char_p
    said = library.nvmlErrorString(error.status)
    message = said.decode(errors="replace") if said else f"status {error.status}"
    return DriverReport(library=True, status=error.status, message=message)


def _call(library: Any, function: str, *arguments: Any) -> None:
    try:
        status = getattr(library, function)(*arguments)
    except AttributeError:
        raise _CallError(_FUNCTION_NOT_FOUND) from None
    if status != _SUCCESS:
        raise _CallError(status)


def _text(library: Any, function: str, *arguments: Any) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(library, function, *arguments, text, ctypes.c_uint(_TEXT_BYTES))
    return text.value.decode(errors="replace")


def _cuda_version(library: Any) -> tuple[int, int]:
    version = ctypes.c_int()
    _call(library, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def _gpus(library: Any) -> tuple[Gpu, ...]:
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    found = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        name = _text(library, "nvmlDeviceGetName", handle)
        uuid = _text(library, "nvmlDeviceGetUUID", handle)
        found.append(Gpu(index, name, uuid, _memory(library, handle)))
    return tuple(found)


def _memory(library: Any, handle: ctypes.c_void_p) -> int:
    """Return a GPU's bytes of memory; 0 for one that shares the host's, which has no figure."""
    memory = _Memory()
    try:
        _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    except _CallError:
        return 0
    return int(memory.total)
