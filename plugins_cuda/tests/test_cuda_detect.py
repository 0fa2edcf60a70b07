"""The CUDA probe on simulated machines: buses, drivers, builds of torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from lmcore.accelerator import CheckStatus, Probe, ProbeState, TorchBuild, torch_build
from lmcore_cuda import doctor, plugin
from lmcore_cuda.detect import probe, visible_gpus
from lmcore_cuda.device import peak_flops
from lmcore_cuda.facts import Facts, pci_gpus
from lmcore_cuda.nvml import DRIVER_NOT_LOADED, DriverReport, Gpu, read_driver

GPUS = tuple(Gpu(index, "NVIDIA H100", f"GPU-{index}abc", 80 * 2**30) for index in range(4))
DRIVER = DriverReport(library=True, version="580.65", cuda=(13, 0), gpus=GPUS)
FIT = Facts(DRIVER, ("0000:01:00.0",), TorchBuild("2.13.0+cu130", "13.0"))
NO_DRIVER = DriverReport(library=False, message="`libnvidia-ml.so.1` is not installed")
CPU_TORCH = TorchBuild("2.13.0+cpu", None)


def with_driver(**more):
    return replace(FIT, driver=replace(DRIVER, **more))


NOT_LOADED = with_driver(status=DRIVER_NOT_LOADED, gpus=())
PIP = "pip install --force-reinstall"


@pytest.mark.parametrize(
    "facts, env, state, count, evidence, fix",
    [
        (FIT, {}, "present", 4, "4 x NVIDIA H100", None),
        (FIT, {"CUDA_VISIBLE_DEVICES": "2,0"}, "present", 2, "leaves 2 of 4", None),
        (FIT, {"CUDA_VISIBLE_DEVICES": ""}, "absent", 0, "hides all 4", None),
        (FIT, {"CUDA_VISIBLE_DEVICES": "-1"}, "absent", 0, "hides all 4", None),
        (Facts(NO_DRIVER, (), CPU_TORCH), {}, "absent", 0, "no NVIDIA GPU", None),
        (replace(FIT, driver=NO_DRIVER), {}, "broken", 0, "0000:01:00.0", "--gpus all"),
        (NOT_LOADED, {}, "broken", 0, "on the PCI bus", "driver"),
        (replace(NOT_LOADED, bus=()), {}, "absent", 0, "no NVIDIA GPU", None),
        (with_driver(status=18, message="version mismatch"), {}, "broken", 0, "mismatch", "reboot"),
        (with_driver(gpus=()), {}, "absent", 0, "lists no GPU", None),
        (replace(FIT, torch=CPU_TORCH), {}, "broken", 4, "built without CUDA",
         f"{PIP} 'torch==2.13.0' --index-url https://download.pytorch.org/whl/cu130"),
        (replace(FIT, torch=TorchBuild("", None)), {}, "broken", 4, "no torch", "'torch' --index"),
        (with_driver(cuda=(12, 8)), {}, "broken", 4, "built with CUDA 13.0", "whl/cu126"),
        (with_driver(cuda=(11, 4)), {}, "broken", 4, "at most 11.4",
         "update the NVIDIA driver to one for CUDA 12.6 or newer"),
        (replace(with_driver(cuda=(12, 4)), torch=CPU_TORCH), {}, "broken", 4, "without CUDA",
         "update the NVIDIA driver to one for CUDA 12.6 or newer"),
        (replace(FIT, torch=TorchBuild("2.12.0a0+c0ffee", None)), {}, "broken", 4, "without CUDA",
         f"run `{PIP} 'torch' --index-url https://download.pytorch.org/whl/cu130`"),
        (replace(with_driver(cuda=(12, 2)), torch=TorchBuild("2.13.0+cu126", "12.6")), {},
         "present", 4, "CUDA 12.6", None),
    ],
)  # fmt: skip
def test_every_state_of_a_machine(facts, env, state, count, evidence, fix):
    """State, count, evidence and fix tell the truth about driver, GPUs and torch's build."""
    found = probe(facts, env)
    assert (found.device_type, found.state, found.count) == ("cuda", state, count)
    assert evidence in "\n".join(found.evidence)
    assert (found.fix is None) == (fix is None)
    assert fix is None or fix in found.fix


def test_a_present_probe_has_facts_for_the_record():
    """Driver, runtime, torch and GPUs are there as JSON values."""
    facts = probe(FIT, {}).facts
    assert (facts["driver"], facts["driver_cuda"]) == ("580.65", "13.0")
    assert (facts["runtime"], facts["torch_build"]) == ("CUDA 13.0", "2.13.0+cu130")
    assert facts["gpus"][3] == {"name": "NVIDIA H100", "uuid": "GPU-3abc", "memory": 80 * 2**30}


@pytest.mark.parametrize(
    "facts, driver",
    [
        (replace(FIT, torch=CPU_TORCH), "580.65"),
        (with_driver(gpus=()), "580.65"),
        (Facts(NO_DRIVER, (), CPU_TORCH), None),
        (replace(FIT, driver=NO_DRIVER), None),
    ],
)
def test_versions_are_told_where_the_device_cannot_be_used_too(facts, driver):
    """They are what someone who looks for the fault needs."""
    found = probe(facts, {}).facts
    assert found.get("driver") == driver
    assert found["torch_build"] == facts.torch.version
    assert found.get("runtime") == (f"CUDA {facts.torch.toolkit}" if facts.torch.toolkit else None)


def test_mixed_gpus_are_all_named():
    """Machines with several kinds list each."""
    mixed = with_driver(gpus=(GPUS[0], Gpu(1, "NVIDIA L4", "GPU-1", 1)))
    assert "NVIDIA H100, NVIDIA L4" in probe(mixed, {}).evidence[0]


@pytest.mark.parametrize(
    "visible, indices",
    [
        ("0", [0]),
        ("3, 1", [3, 1]),
        ("GPU-2", [2]),
        ("GPU-2abc,0", [2, 0]),
        ("1,9,2", [1]),
        ("0,0", []),
        ("GPU-", []),
        ("MIG-GPU-1abc/0/0", [1]),
        ("none", []),
    ],
)
def test_visible_devices_as_cuda_reads_them(visible, indices):
    """Indices and UUIDs in order, cut at the first that fits nothing, empty with a repetition."""
    found = visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in found] == indices


class FakeNvml:
    """NVML's functions over two GPUs; *failing* returns *status*."""

    def __init__(self, failing="", status=0):
        self.failing, self.status, self.shut = failing, status, False

    def __getattr__(self, name):
        if name == "nvmlErrorString":
            return lambda status: f"error {status}".encode()

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

    def do_nvmlSystemGetDriverVersion(self, text, size):  # noqa: N802
        text.value = b"580.65"

    def do_nvmlSystemGetCudaDriverVersion_v2(self, version):  # noqa: N802
        ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = 12080

    def do_nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 2

    def do_nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1

    def do_nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))[0] = handle.value * 1000

    def do_nvmlDeviceGetName(self, handle, text, size):  # noqa: N802
        text.value = f"GPU of {handle.value}".encode()

    def do_nvmlDeviceGetUUID(self, handle, text, size):  # noqa: N802
        text.value = f"GPU-{handle.value}".encode()


def test_nvml_is_read_and_shut_down():
    """Versions and GPUs come back, and the library is left as it was found."""
    library = FakeNvml()
    assert read_driver(library) == DriverReport(
        library=True,
        version="580.65",
        cuda=(12, 8),
        gpus=(Gpu(0, "GPU of 1", "GPU-1", 1000), Gpu(1, "GPU of 2", "GPU-2", 2000)),
    )
    assert library.shut


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetName"])
def test_an_nvml_error_is_reported_in_its_words(failing):
    """Whatever call fails, its status and text are kept."""
    library = FakeNvml(failing, 15)
    report = read_driver(library)
    assert (report.library, report.status, report.message) == (True, 15, "error 15")
    assert library.shut == (failing != "nvmlInit_v2")
    assert not read_driver(None).library


def test_a_gpu_without_memory_of_its_own_is_no_fault():
    """Where NVML has no figure for memory, the GPU still counts."""
    report = read_driver(FakeNvml("nvmlDeviceGetMemoryInfo", 3))
    assert [gpu.memory for gpu in report.gpus] == [0, 0]


def test_a_library_too_old_for_a_function_is_reported():
    """A missing symbol is NVML's "function not found", not an exception."""

    class Ancient(FakeNvml):
        def __getattr__(self, name):
            if name == "nvmlSystemGetCudaDriverVersion_v2":
                raise AttributeError(name)
            return super().__getattr__(name)

    assert read_driver(Ancient()).status == 13


def test_gpus_are_found_on_the_bus(tmp_path):
    """Display devices of the vendor count; its audio functions and others' devices do not."""
    devices = {"01:00.0": ("0x10de", "0x030200"), "01:00.1": ("0x10de", "0x040300"),
               "02:00.0": ("0x8086", "0x030000")}  # fmt: skip
    for address, (vendor, kind) in devices.items():
        folder = tmp_path / "sys/bus/pci/devices" / f"0000:{address}"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n", encoding="utf-8")
        (folder / "class").write_text(f"{kind}\n", encoding="utf-8")
    assert pci_gpus(tmp_path) == ("0000:01:00.0",)
    assert pci_gpus(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    "line, cuda",
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ('cuda = "12.6"', "12.6"),
        ("cuda: Optional[str] = None", None),
        ("cuda_other = '1'", None),
    ],
)
def test_torchs_build_is_read_as_text(tmp_path, line, cuda):
    """Torch's version file tells the build without being imported."""
    file = tmp_path / "version.py"
    file.write_text(f"__version__ = '2.13.0+x'\n{line}\nhip = None\n", encoding="utf-8")
    assert torch_build("cuda", file) == TorchBuild("2.13.0+x", cuda)
    assert torch_build("cuda", file).release == "2.13.0"


@pytest.mark.parametrize(
    "name, dtype, wanted",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA L40S", "float16", 362e12),
        ("NVIDIA L4", "float16", 121e12),
        ("NVIDIA L40", "float16", None),
        ("NVIDIA H100 PCIe", "float64", None),
        ("NVIDIA GeForce GTX 1080", "float32", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, dtype, wanted):
    """Names are matched by whole words; an unknown one has no figure."""
    assert peak_flops(name, dtype) == wanted


def test_the_probe_of_this_machine_loads_no_torch():
    """The hooks answer in a fresh interpreter without importing torch."""
    script = (
        "import os, sys; from lmcore_cuda import plugin; plugin.lmcore_plugin_info();"
        "plugin.lmcore_probe(os.environ); sys.exit('torch' in sys.modules)"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0


def test_doctor_tells_the_truth_without_hardware(monkeypatch):
    """Nothing fails where there is no GPU, and the driver fails where one cannot be used."""
    monkeypatch.setattr(doctor, "read_facts", lambda: Facts(NO_DRIVER, (), CPU_TORCH))
    absent = doctor.checks(probe(Facts(NO_DRIVER, (), CPU_TORCH), {}))
    assert {check.status for check in absent} == {CheckStatus.SKIPPED}
    facts = replace(FIT, torch=CPU_TORCH)
    monkeypatch.setattr(doctor, "read_facts", lambda: facts)
    broken = {check.name: check for check in doctor.checks(probe(facts, {}))}
    assert broken["driver"].status is CheckStatus.OK
    assert broken["torch build"].status is CheckStatus.FAILED
    assert "whl/cu130" in broken["torch build"].fix


def test_policies_follow_the_gpu():
    """fp16 is always offered, bfloat16 first where the GPU computes in it."""

    class Old:
        type, dtypes = "cuda", frozenset({"float32", "float16"})

    class New:
        type, dtypes = "cuda", frozenset({"float32", "float16", "bfloat16"})

    old = plugin.lmcore_precision_policies(Old)
    assert [(one.name, one.loss_scaling) for one in old] == [("fp32", False), ("fp16", True)]
    assert max(old, key=lambda one: one.priority).name == "fp32"
    new = plugin.lmcore_precision_policies(New)
    assert max(new, key=lambda one: one.priority).name == "bf16"
    (backend,) = plugin.lmcore_comm_backends()
    assert (backend.name, backend.needs_device_id) == ("nccl", True)


def test_the_probe_is_one_of_the_contract():
    """What the hook returns is a `Probe` with a state."""
    found = plugin.lmcore_probe({})
    assert isinstance(found, Probe)
    assert isinstance(found.state, ProbeState)
