"""Report of `lmcore doctor` on simulated GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcore.contract import CheckStatus, TorchBuild
from lmcore_cuda import doctor
from lmcore_cuda.detection.facts import DeniedFile, Facts
from lmcore_cuda.driver.gpu_use import GpuProcess, GpuUse
from lmcore_cuda.driver.nvml import DriverReport, Gpu, GpuFault
from lmcore_cuda.probe import probe

GPUS = tuple(Gpu(index, "NVIDIA H100", f"GPU-{index}", 80 << 30, 0, (9, 0)) for index in range(2))
DRIVER = DriverReport(library=True, version="580.65", cuda=(13, 0), gpus=GPUS)
FIT = Facts(DRIVER, (), TorchBuild("2.13.0+cu130", "13.0"), ("sm_90",))
NO_DRIVER = Facts(DriverReport(library=False, message="none"), (), TorchBuild("2.13.0+cpu", None))
IDLE = GpuUse(80 << 30, 1 << 30, (), 700.0, 700.0)


@pytest.fixture
def check(monkeypatch):
    """Runs the checks on facts and uses of GPUs; returns them by name."""
    monkeypatch.setattr(doctor, "load_library", lambda: None)
    monkeypatch.setattr(doctor, "why_no_nccl", lambda: None)
    monkeypatch.setattr(doctor, "nccl_version", lambda: "2.29.7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(facts, use=IDLE, **env):
        monkeypatch.setattr(doctor, "read_facts", lambda: facts)
        monkeypatch.setattr(doctor, "read_use", lambda _library, _uuid: use)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return {check.name: check for check in doctor.checks(probe(facts, env))}

    return run


def test_nothing_fails_without_hardware(check):
    """No GPU, no driver, a torch without CUDA: nothing to check."""
    found = check(NO_DRIVER)
    assert {check.status for check in found.values()} == {CheckStatus.SKIPPED}


def test_a_machine_in_order_is_ok(check):
    """Driver, build, memory of each GPU and NCCL."""
    found = check(FIT)
    assert set(found) == {"driver", "torch build", "cuda:0 memory", "cuda:1 memory", "nccl"}
    assert {check.status for check in found.values()} == {CheckStatus.OK}
    assert found["nccl"].detail == "version 2.29.7"
    assert "for sm_90" in found["torch build"].detail
    assert found["driver"].detail == "580.65, 2 GPUs, CUDA up to 13.0"


def test_one_gpu(check):
    """The noun is in the singular for one GPU."""
    found = check(replace(FIT, driver=replace(DRIVER, gpus=GPUS[:1])))
    assert found["driver"].detail == "580.65, 1 GPU, CUDA up to 13.0"


def test_a_torch_without_cuda_is_the_fault(check):
    """The driver passes, and the fix is the command that installs another torch."""
    found = check(replace(FIT, torch=TorchBuild("2.13.0+cpu", None)))
    assert found["driver"].status is CheckStatus.OK
    assert found["torch build"].status is CheckStatus.FAILED
    assert "whl/cu130" in found["torch build"].fix


def test_a_torch_for_other_gpus_is_the_fault(check):
    """The GPUs without kernels are named."""
    found = check(replace(FIT, architectures=("sm_70",)))
    assert found["torch build"].status is CheckStatus.FAILED
    assert "no kernels for NVIDIA H100" in found["torch build"].detail


def test_gpus_in_use_slowed_or_throttled_are_warned_of(check):
    """The report has the processes with memory, the missing watts and the slowdowns."""
    use = GpuUse(80 << 30, 70 << 30, (GpuProcess(7, "train", 69 << 30),), 400.0, 700.0, ("heat",))
    found = check(FIT, use)
    for name, detail in (("memory", "process 7 (train)"), ("power", "400 W of 700 W"),
                        ("clock", "slowed down now by heat")):  # fmt: skip
        assert found[f"cuda:0 {name}"].status is CheckStatus.WARNING
        assert detail in found[f"cuda:0 {name}"].detail
    assert "-pl 700" in found["cuda:1 power"].fix
    assert check(FIT, None)["cuda:0 memory"].status is CheckStatus.SKIPPED


def test_driver_settings_are_reported(check):
    """Lost GPUs, a missing NVML and files that may not be opened."""
    lost = replace(DRIVER, faults=(GpuFault(5, 15, "GPU is lost"),))
    found = check(replace(FIT, driver=lost, denied=(DeniedFile("/dev/nvidia9", ""),)))
    assert "place 5: GPU is lost" in found["driver"].detail
    assert "`/dev/nvidia9`" in found["device file"].detail
    bare = replace(DRIVER, already_visible=True, version="", message="no NVML")
    assert "compute,utility" in check(replace(FIT, driver=bare))["driver"].fix


@pytest.mark.parametrize(
    "setting, status",
    [("1", CheckStatus.OK), ("1,8", CheckStatus.WARNING), ("8", CheckStatus.FAILED)],
)
def test_the_visible_devices_are_checked(check, setting, status):
    """A wrong variable has a separate line."""
    assert check(FIT, CUDA_VISIBLE_DEVICES=setting)["CUDA_VISIBLE_DEVICES"].status is status


def test_a_torch_without_nccl_is_warned_of(check, monkeypatch):
    """One GPU works without it."""
    monkeypatch.setattr(doctor, "why_no_nccl", lambda: "torch was built without NCCL")
    assert check(FIT)["nccl"].status is CheckStatus.WARNING
