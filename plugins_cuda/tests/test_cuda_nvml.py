"""NVML and the compute driver through ctypes: signatures, sizes, faults."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lmcore_cuda.driver.cuda_api import read_compute_driver
from lmcore_cuda.driver.gpu_use import GpuProcess, GpuUse, ProcessInfo, read_use
from lmcore_cuda.driver.nvml import DriverReport, Gpu, GpuFault, Memory, read_driver

SOURCE = Path(__file__).with_name("fake_nvml.c")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library of `fake_nvml.c`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return ctypes.CDLL(str(library))


def test_structures_have_the_sizes_of_the_header():
    """24 bytes each, as `sizeof` gives for `nvmlMemory_t` and `nvmlProcessInfo_v2_t`."""
    assert (ctypes.sizeof(Memory), ctypes.sizeof(ProcessInfo)) == (24, 24)
    offsets = [getattr(ProcessInfo, name).offset for name, _ in ProcessInfo._fields_]
    assert offsets == [0, 8, 16, 20]


def test_a_compiled_library_is_read(compiled: Any):
    """Parts, capabilities and memory arrive; a denied GPU is reported, and not counted."""
    assert read_driver(compiled) == DriverReport(
        library=True,
        version="580.65.06",
        cuda=(13, 0),
        gpus=(
            Gpu(0, "NVIDIA A100-SXM4-80GB", "GPU-0", 80 << 30, 1 << 30, (8, 0), True,
                ("MIG-10", "MIG-11")),
            Gpu(1, "Tesla V100-SXM2-32GB", "GPU-2", 80 << 30, 3 << 30, (7, 0)),
        ),
        faults=(GpuFault(1, 4, "Insufficient Permissions"),),
    )  # fmt: skip
    assert compiled.open_contexts() == 0


def test_processes_power_and_clock_are_read(compiled: Any, tmp_path: Path):
    """More processes than there was room for at first, names from both sources, watts, reasons."""
    (tmp_path / "1001").mkdir()
    (tmp_path / "1001" / "comm").write_text("from-proc\n", encoding="utf-8")
    use = read_use(compiled, "GPU-2", tmp_path)
    assert use is not None
    assert (use.total, use.used, len(use.processes)) == (80 << 30, 3 << 30, 70)
    assert use.processes[0] == GpuProcess(1069, "python3", 69 << 20)
    assert GpuProcess(1001, "from-proc", 1 << 20) in use.processes
    assert GpuProcess(1003, "other", None) in use.processes
    assert (use.power_limit, use.power_default) == (150.0, 300.0)
    assert use.slowdowns == ("the power limit", "heat")
    assert compiled.open_contexts() == 0


def test_an_unknown_gpu_has_no_use(compiled: Any):
    """An unknown GPU, or no library, is no fault."""
    assert read_use(compiled, "GPU-9") is None
    assert read_use(None, "GPU-2") is None


def test_use_in_words():
    """The largest processes are named, the others counted; none named is said."""
    many = tuple(GpuProcess(number, "a", number << 30) for number in range(8, 0, -1))
    text = GpuUse(80 << 30, 79 << 30, many).words
    assert text.startswith("79.0 GiB of 80.0 GiB are in use: process 8 (a): 8.0 GiB; ")
    assert text.endswith("and 2 more")
    assert str(GpuProcess(5, "", None)) == "process 5"
    assert "names no process" in GpuUse(1, 1).words


class FakeNvml:
    """NVML's functions over two GPUs; *failing* returns *status*."""

    def __init__(self, failing="", status=0):
        self.failing, self.status, self.shut = failing, status, False

    def __getattr__(self, name):
        if name == "nvmlErrorString":
            return lambda status: f"error {status.value}".encode()

        def function(*arguments):
            if name == self.failing:
                return self.status
            answer = getattr(type(self), f"do_{name}", None)
            if answer is not None:
                answer(self, *arguments)
            return 0

        return function

    def do_nvmlShutdown(self):  # noqa: N802
        self.shut = True

    def do_nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 2


@pytest.mark.parametrize(
    "failing", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion"]
)
def test_an_nvml_error_is_reported_in_its_words(failing):
    """The status and text of a failed call are kept, and the library left as it was found."""
    library = FakeNvml(failing, 15)
    report = read_driver(library)
    assert (report.library, report.status, report.message) == (True, 15, "error 15")
    assert library.shut == (failing != "nvmlInit_v2")
    assert not read_driver(None).library


@pytest.mark.parametrize("failing", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName"])
def test_gpus_that_do_not_answer_are_reported_one_by_one(failing):
    """A lost GPU takes no other one down."""
    report = read_driver(FakeNvml(failing, 15))
    assert (report.status, report.gpus) == (0, ())
    assert report.faults == (GpuFault(0, 15, "error 15"), GpuFault(1, 15, "error 15"))


def test_a_gpu_without_memory_of_its_own_is_no_fault():
    """A GPU without figures for memory or capability still counts."""
    report = read_driver(FakeNvml("nvmlDeviceGetMemoryInfo", 3))
    assert [gpu.memory for gpu in report.gpus] == [0, 0]
    report = read_driver(FakeNvml("nvmlDeviceGetCudaComputeCapability", 3))
    assert [gpu.capability for gpu in report.gpus] == [(0, 0), (0, 0)]


def test_a_library_too_old_for_a_function_is_reported():
    """A missing symbol is NVML's "function not found", not an exception."""

    class Ancient(FakeNvml):
        def __getattr__(self, name):
            if name == "nvmlSystemGetCudaDriverVersion_v2":
                raise AttributeError(name)
            return super().__getattr__(name)

    assert read_driver(Ancient()).status == 13


class FakeDriver:
    """The compute driver over one GPU; `cuInit` returns *status*."""

    def __init__(self, status=0):
        self.status = status

    def cuInit(self, flags):  # noqa: N802
        assert flags.value == 0
        return self.status

    def cuGetErrorString(self, status, text):  # noqa: N802
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"system not yet initialized"
        return 0

    def _int(self, pointer, value):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0

    def cuDriverGetVersion(self, version):  # noqa: N802
        return self._int(version, 13000)

    def cuDeviceGetCount(self, count):  # noqa: N802
        return self._int(count, 1)

    def cuDeviceGet(self, device, index):  # noqa: N802
        return self._int(device, index.value)

    def cuDeviceGetName(self, text, size, device):  # noqa: N802
        assert size.value == 256
        text.value = b"NVIDIA L4"
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):  # noqa: N802
        ctypes.cast(memory, ctypes.POINTER(ctypes.c_size_t))[0] = 24 << 30
        return 0

    def cuDeviceGetUuid(self, raw, device):  # noqa: N802
        raw[:] = bytes(range(16))
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        return self._int(value, {75: 8, 76: 9}[attribute.value])


def test_the_compute_driver_answers_where_nvml_is_missing():
    """The GPUs that CUDA shows, with what is missing said."""
    report = read_compute_driver(FakeDriver(), "no NVML")
    gpu = Gpu(0, "NVIDIA L4", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", 24 << 30,
              capability=(8, 9))  # fmt: skip
    assert report == DriverReport(
        library=True, message="no NVML", cuda=(13, 0), gpus=(gpu,), already_visible=True
    )


@pytest.mark.parametrize(
    "status, message", [(100, "no NVML"), (802, "not yet initialized; no NVML")]
)
def test_a_compute_driver_without_gpus_says_why(status, message):
    """No GPU is no fault; another status is, in the driver's words."""
    report = read_compute_driver(FakeDriver(status), "no NVML")
    assert report.gpus == ()
    assert report.status == (0 if status == 100 else status)
    assert message in report.message
    assert not read_compute_driver(None, "no NVML").library
