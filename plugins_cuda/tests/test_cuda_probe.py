"""The CUDA probe on simulated machines: buses, drivers, builds of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

import pytest

from lmcore.contract import Probe, ProbeState, TorchBuild, torch_build
from lmcore_cuda import plugin
from lmcore_cuda.detection import facts as facts_module
from lmcore_cuda.detection.facts import DeniedFile, Facts, denied_files, pci_gpus, read_facts
from lmcore_cuda.driver.nvml import DRIVER_NOT_LOADED, DriverReport, Gpu, GpuFault
from lmcore_cuda.probe import probe

GPUS = tuple(
    Gpu(index, "NVIDIA H100", f"GPU-{index}abc", 80 * 2**30, 0, (9, 0)) for index in range(4)
)
DRIVER = DriverReport(library=True, version="580.65", cuda=(13, 0), gpus=GPUS)
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
FIT = Facts(DRIVER, ("0000:01:00.0",), TorchBuild("2.13.0+cu130", "13.0"), CU130)
NO_DRIVER = DriverReport(library=False, message="`libnvidia-ml.so.1` is not installed")
CPU_TORCH = TorchBuild("2.13.0+cpu", None)


def with_driver(**more):
    return replace(FIT, driver=replace(DRIVER, **more))


def with_gpus(*capabilities, built=CU130, torch="2.13.0+cu130", **more):
    gpus = [
        Gpu(index, f"GPU of {major}", f"GPU-{index}", 8 << 30, 0, (major, minor))
        for index, (major, minor) in enumerate(capabilities)
    ]
    toolkit = f"{torch[-3:-1]}.{torch[-1]}"
    facts = with_driver(gpus=tuple(gpus), **more)
    return replace(facts, architectures=built, torch=TorchBuild(torch, toolkit))


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
        (with_driver(status=999, message="Unknown Error"), {}, "broken", 0, "Unknown Error",
         "in a container: restart it"),
        (with_driver(status=17, message="blocked"), {}, "broken", 0, "blocked",
         "restart the container or the job"),
        (with_driver(status=802, message="system not yet initialized"), {}, "broken", 0,
         "not yet initialized", "`nvidia-fabricmanager`"),
        (with_driver(gpus=()), {}, "absent", 0, "lists no GPU", None),
        (with_driver(gpus=(), faults=(GpuFault(0, 4, "denied"),)), {}, "absent", 0,
         "not given to this process", None),
        (with_driver(gpus=(), faults=(GpuFault(3, 15, "GPU is lost"),)), {}, "broken", 0,
         "place 3 on the bus: GPU is lost", "--gpu-reset"),
        (with_driver(faults=(GpuFault(3, 15, "GPU is lost"),)), {}, "present", 4,
         "place 3 on the bus: GPU is lost", None),
        (replace(FIT, driver=NO_DRIVER, denied=(DeniedFile("/dev/nvidia0", "video"),)), {},
         "broken", 0, "may not open `/dev/nvidia0`", "sudo usermod -aG video $USER"),
        (with_driver(gpus=(), status=4, message="no"), {}, "broken", 0, "not answer", "reboot"),
        (replace(with_driver(gpus=()), denied=(DeniedFile("/dev/nvidiactl", "root"),)), {},
         "broken", 0, "`/dev/nvidiactl`", "ask the administrator"),
        (FIT, {"CUDA_VISIBLE_DEVICES": "7"}, "broken", 0, "`7` is no GPU", "from 0 to 3"),
        (FIT, {"CUDA_VISIBLE_DEVICES": "1,1"}, "broken", 0, "GPU 1 twice", "each GPU once"),
        (FIT, {"CUDA_VISIBLE_DEVICES": "1,7"}, "present", 1, "CUDA stops there", None),
        (with_driver(already_visible=True, version=""), {"CUDA_VISIBLE_DEVICES": "3"}, "present",
         4, "NVIDIA driver, for CUDA up to 13.0", None),
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
        (replace(FIT, architectures=()), {}, "present", 4, "CUDA 13.0", None),
        (with_gpus((7, 0)), {}, "broken", 1, "not for compute capability 7.0", "whl/cu126"),
        (with_gpus((10, 0), built=CU126, torch="2.13.0+cu126"), {}, "broken", 1,
         "not for compute capability 10.0", "whl/cu130"),
        (with_gpus((12, 0), built=CU126, torch="2.13.0+cu126", cuda=(12, 8)), {}, "broken", 1,
         "capability 12.0", "update the NVIDIA driver to one for CUDA 13.0"),
        (with_gpus((3, 7)), {}, "broken", 1, "capability 3.7", "no build of PyTorch"),
        (with_gpus((9, 0), (6, 1), (9, 0)), {}, "broken", 3, "capability 6.1",
         "hide GPU of 6: `export CUDA_VISIBLE_DEVICES=GPU-0,GPU-2`"),
        (replace(with_gpus((7, 0)), torch=CPU_TORCH), {}, "broken", 1, "without CUDA", "cu126"),
        (replace(FIT, torch=TorchBuild("2.8.0+cpu", None)), {}, "broken", 4, "without CUDA",
         f"{PIP} 'torch==2.8.0' --index-url https://download.pytorch.org/whl/cu128"),
        (with_gpus((12, 0), built=CU126, torch="2.10.0+cu126", cuda=(12, 8)), {}, "broken", 1,
         "capability 12.0", "whl/cu128"),
        (with_gpus((12, 0), built=CU126, torch="2.8.0+cu126", cuda=(12, 6)), {}, "broken", 1,
         "capability 12.0", "update the NVIDIA driver to one for CUDA 12.8"),
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
    assert facts["gpus"][3] == {
        "name": "NVIDIA H100",
        "uuid": "GPU-3abc",
        "memory": 80 * 2**30,
        "capability": "9.0",
    }


@pytest.mark.parametrize(
    "facts, driver",
    [
        (replace(FIT, torch=CPU_TORCH), "580.65"),
        (with_driver(gpus=()), "580.65"),
        (Facts(NO_DRIVER, (), CPU_TORCH), None),
        (replace(FIT, driver=NO_DRIVER), None),
    ],
)
def test_versions_are_reported_for_an_unusable_device_too(facts, driver):
    """They are what someone who looks for the fault needs."""
    found = probe(facts, {}).facts
    assert found.get("driver") == driver
    assert found["torch_build"] == facts.torch.version
    assert found.get("runtime") == (f"CUDA {facts.torch.toolkit}" if facts.torch.toolkit else None)


def test_mixed_gpus_are_all_named():
    """Machines with several kinds list each."""
    mixed = with_driver(gpus=(GPUS[0], Gpu(1, "NVIDIA L4", "GPU-1", 1, 0, (8, 9))))
    assert "NVIDIA H100, NVIDIA L4" in probe(mixed, {}).evidence[0]


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


def test_files_that_may_not_be_opened_are_found(tmp_path, monkeypatch):
    """The driver's device files alone count, each with the group that owns it."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        (tmp_path / "dev" / name).touch()
    assert denied_files(tmp_path) == ()
    monkeypatch.setattr(facts_module.os, "access", lambda path, _mode: path.name != "nvidia0")
    (found,) = denied_files(tmp_path)
    assert found.path == str(tmp_path / "dev/nvidia0")
    assert found.group == (tmp_path / "dev/nvidia0").group()


@pytest.mark.parametrize("files", [(), ("nvidia0",)])
def test_the_compute_driver_is_queried_if_there_is_a_device_file(tmp_path, monkeypatch, files):
    """Its library is loaded only where NVML's is missing and a GPU is there all the same."""
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(facts_module, "load_library", lambda: None)
    monkeypatch.setattr(facts_module, "load_driver", lambda: None)
    calls = []

    def read(library, missing):
        calls.append((library, missing))
        return replace(DRIVER, already_visible=True)

    monkeypatch.setattr(facts_module, "read_compute_driver", read)
    found = read_facts(tmp_path)
    assert calls == ([(None, "`libnvidia-ml.so.1` is not installed")] if files else [])
    assert found.driver.gpus == (GPUS if files else ())


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
    """Torch's version file has the build; it is not imported."""
    file = tmp_path / "version.py"
    file.write_text(f"__version__ = '2.13.0+x'\n{line}\nhip = None\n", encoding="utf-8")
    assert torch_build("cuda", file) == TorchBuild("2.13.0+x", cuda)
    assert torch_build("cuda", file).release == "2.13.0"


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


def test_policies_follow_the_gpu():
    """fp16 is always offered, bfloat16 first where the GPU computes in it."""

    class Old:
        type, dtypes = "cuda", frozenset({"float32", "float16"})
        facts: ClassVar = {"capability": "7.0"}

    class New:
        type, dtypes = "cuda", frozenset({"float32", "float16", "bfloat16"})
        facts: ClassVar = {"capability": "8.0"}

    old = plugin.lmcore_precision_policies(Old)
    plain = [(policy.name, policy.loss_scaling) for policy in old if policy.name != "fp8"]
    assert plain == [("fp32", False), ("fp16", True)]
    assert max(old, key=lambda policy: policy.priority).name == "fp32"
    new = plugin.lmcore_precision_policies(New)
    assert max(new, key=lambda policy: policy.priority).name == "bf16"


def test_the_probe_is_one_of_the_contract():
    """The hook returns a `Probe` with a state."""
    found = plugin.lmcore_probe({})
    assert isinstance(found, Probe)
    assert isinstance(found.state, ProbeState)
