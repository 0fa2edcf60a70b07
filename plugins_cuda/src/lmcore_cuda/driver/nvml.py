"""Report of the driver's management library (NVML), which creates no context on a GPU.

The signatures are from `nvml.h` of CUDA 12.9's toolkit; every function here is older than the
oldest driver that runs CUDA 12.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DRIVER_NOT_LOADED",
    "NO_PERMISSION",
    "OPERATING_SYSTEM",
    "UNKNOWN",
    "DriverReport",
    "Gpu",
    "GpuFault",
    "Nvml",
    "NvmlError",
    "load_library",
    "read_driver",
]

LIBRARY = "libnvidia-ml.so.1"
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 3, 4, 6, 7
DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, OPERATING_SYSTEM, UNKNOWN = 9, 13, 17, 999
_SUCCESS = 0
_TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE, the longest of those that are read
_MIG_ENABLED = 1


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver lists it.

    Attributes:
        index: CUDA's number of it, in the order of the PCI bus.
        name: NVIDIA's name.
        uuid: "GPU-...".
        memory: Bytes in all; 0 if it shares the host's.
        used: Bytes in use.
        capability: Compute capability, (8, 9); (0, 0) if unknown.
        mig: True if it is in MIG mode, to be used in parts.
        parts: UUIDs of the parts, "MIG-...".
    """

    index: int
    name: str
    uuid: str
    memory: int
    used: int = 0
    capability: tuple[int, int] = (0, 0)
    mig: bool = False
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuFault:
    """A GPU that the driver has but does not offer: its bus address, and the reason."""

    index: int
    status: int
    message: str


@dataclass(frozen=True)
class DriverReport:
    """Report of the driver.

    Attributes:
        library: True if a library of the driver is installed and can be loaded.
        status: NVML's status of the first call that failed; 0 when all went well.
        message: Text of that status, from the driver.
        version: Version of the driver; empty if unknown.
        cuda: Highest CUDA version that the driver can run, (major, minor).
        gpus: All GPUs that this process may use, in the order of the PCI bus.
        faults: The GPUs that it may not use, or cannot.
        already_visible: True if `gpus` has only what `CUDA_VISIBLE_DEVICES` leaves, in its order.
    """

    library: bool
    status: int = _SUCCESS
    message: str = ""
    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = ()
    faults: tuple[GpuFault, ...] = ()
    already_visible: bool = False


class Memory(ctypes.Structure):
    """`nvmlMemory_t`, 24 bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NvmlError(Exception):
    """A call that NVML answered with a status other than success."""

    def __init__(self, status: int, message: str) -> None:
        """Keep the status and the driver's text for it."""
        super().__init__(message)
        self.status = status
        self.message = message


def load_library() -> Any:
    """Return the driver's management library, or None if it is not installed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


class Nvml:
    """NVML's functions, with exceptions in place of statuses."""

    def __init__(self, library: Any) -> None:
        """Wrap what `load_library` returned; see `opened`."""
        self.library = library

    @classmethod
    @contextlib.contextmanager
    def opened(cls, library: Any) -> Iterator[Nvml]:
        """Initialize the library for the time of the context.

        Raises:
            NvmlError: Initialization failed; nothing has to be shut down.
        """
        nvml = cls(library)
        nvml.call("nvmlInit_v2")
        try:
            yield nvml
        finally:
            library.nvmlShutdown()

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function whose result is a status.

        Raises:
            NvmlError: The call failed, or the library lacks the function.
        """
        try:
            status = getattr(self.library, function)(*arguments)
        except AttributeError:
            status = FUNCTION_NOT_FOUND
        if status != _SUCCESS:
            raise NvmlError(status, self._words(status))

    def _words(self, status: int) -> str:
        self.library.nvmlErrorString.restype = ctypes.c_char_p
        text = self.library.nvmlErrorString(ctypes.c_int(status))
        return text.decode(errors="replace") if text else f"status {status}"

    def text(self, function: str, *arguments: Any) -> str:
        """Return the text that a function writes to a buffer, with its length as last argument."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(function, *arguments, text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode(errors="replace")

    def number(self, function: str, *arguments: Any) -> int:
        """Return the number that a function writes to an `unsigned int`, its last argument."""
        number = ctypes.c_uint()
        self.call(function, *arguments, ctypes.byref(number))
        return number.value

    def handle(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """Return the device that a function finds."""
        handle = ctypes.c_void_p()
        self.call(function, *arguments, ctypes.byref(handle))
        return handle

    def memory(self, handle: ctypes.c_void_p) -> Memory:
        """Return a GPU's memory; zeros for one that shares the host's, which has no figures."""
        memory = Memory()
        try:
            self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        except NvmlError:
            return Memory()
        return memory


def read_driver(library: Any) -> DriverReport:
    """Return the report of *library* (from `load_library`); errors of NVML become a part of it."""
    if library is None:
        return DriverReport(library=False, message=f"`{LIBRARY}` is not installed")
    try:
        with Nvml.opened(library) as nvml:
            gpus, faults = _gpus(nvml)
            return DriverReport(
                library=True,
                version=nvml.text("nvmlSystemGetDriverVersion"),
                cuda=_cuda_version(nvml),
                gpus=tuple(gpus),
                faults=tuple(faults),
            )
    except NvmlError as error:
        return DriverReport(library=True, status=error.status, message=error.message)


def _cuda_version(nvml: Nvml) -> tuple[int, int]:
    version = ctypes.c_int()
    nvml.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def _gpus(nvml: Nvml) -> tuple[list[Gpu], list[GpuFault]]:
    """Return the usable GPUs and the faulty ones; CUDA numbers only the usable ones."""
    found: list[Gpu] = []
    faults: list[GpuFault] = []
    for place in range(nvml.number("nvmlDeviceGetCount_v2")):
        try:
            handle = nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(place))
            found.append(_gpu(nvml, handle, len(found)))
        except NvmlError as error:
            faults.append(GpuFault(place, error.status, error.message))
    return found, faults


def _gpu(nvml: Nvml, handle: ctypes.c_void_p, index: int) -> Gpu:
    name = nvml.text("nvmlDeviceGetName", handle)
    uuid = nvml.text("nvmlDeviceGetUUID", handle)
    memory = nvml.memory(handle)
    mig = _mig(nvml, handle)
    return Gpu(
        index,
        name,
        uuid,
        int(memory.total),
        int(memory.used),
        _capability(nvml, handle),
        mig,
        _parts(nvml, handle) if mig else (),
    )


def _capability(nvml: Nvml, handle: ctypes.c_void_p) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        nvml.call(
            "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)
        )
    except NvmlError:
        return 0, 0
    return major.value, minor.value


def _mig(nvml: Nvml, handle: ctypes.c_void_p) -> bool:
    now, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml.call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(pending))
    except NvmlError:  # NOT_SUPPORTED on most GPUs
        return False
    return now.value == _MIG_ENABLED


def _parts(nvml: Nvml, handle: ctypes.c_void_p) -> tuple[str, ...]:
    """Return the UUIDs of a GPU's parts; empty places are skipped."""
    found = []
    try:
        places = nvml.number("nvmlDeviceGetMaxMigDeviceCount", handle)
    except NvmlError:
        return ()
    for place in range(places):
        with contextlib.suppress(NvmlError):  # NOT_FOUND: none is there
            part = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(place))
            found.append(nvml.text("nvmlDeviceGetUUID", part))
    return tuple(found)
