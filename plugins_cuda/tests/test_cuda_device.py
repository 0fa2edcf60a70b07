"""Creation of the device over a simulated GPU; torch's functions keep their signatures."""

from __future__ import annotations

import importlib.util
import logging
import os
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch

from lmcore.base.errors import ConfigError, DeviceError
from lmcore.config.option import options_of
from lmcore.config.section import Config
from lmcore.contract import Probe, ProbeState
from lmcore_cuda import comm, device, plugin
from lmcore_cuda.driver.gpu_use import GpuProcess, GpuUse
from lmcore_cuda.faults import hint_for
from lmcore_cuda.settings import CudaSection, allocator_settings, problems_of

PROBE = Probe(
    "cuda",
    ProbeState.PRESENT,
    1,
    facts={"gpus": [{"name": "NVIDIA H100 PCIe", "uuid": "GPU-1"}], "driver": "580.65"},
)
IDLE = GpuUse(80 << 30, 1 << 30)
BUSY = GpuUse(80 << 30, 79 << 30, (GpuProcess(77, "vllm", 78 << 30),))


class FakeGpu:
    """torch.cuda over one GPU."""

    def __init__(self, monkeypatch):
        self.properties = SimpleNamespace(
            name="NVIDIA H100 PCIe", major=9, minor=0, multi_processor_count=114, total_memory=80
        )
        self.built = ["sm_80", "sm_90"]
        self.use = IDLE
        self.refused = None
        self.asked = []
        answers = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_properties": lambda *_: self.properties,
            "get_device_name": lambda *_: self.properties.name,
            "get_arch_list": lambda: self.built,
            "is_bf16_supported": lambda **_: self.properties.major >= 8,
        }
        for name, answer in answers.items():
            fake = create_autospec(getattr(torch.cuda, name), side_effect=answer)
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(device, "read_use", self.read_use)
        monkeypatch.setattr(device.torch, "empty", self.empty)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    def read_use(self, _library, uuid):
        assert uuid == "GPU-1"
        self.asked.append("use")
        return self.use

    def empty(self, *_shape, device):
        self.asked.append(str(device))
        if self.refused is not None:
            raise self.refused


@pytest.fixture
def gpu(monkeypatch):
    """A GPU; the process's precision of products is put back."""
    before = torch.get_float32_matmul_precision()
    yield FakeGpu(monkeypatch)
    torch.set_float32_matmul_precision(before)


def test_a_gpu_becomes_a_device(gpu):
    """Abilities are torch's; name, dtypes, peak and facts are the GPU's."""
    found = device.create_device(PROBE)
    assert (found.type, found.index, found.name) == ("cuda", 0, "NVIDIA H100 PCIe")
    assert found.dtypes == {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn"}
    assert found.missing == {}
    assert found.require("peak_flops")("bfloat16") == 756e12
    assert found.facts["capability"] == "9.0"
    assert found.facts["architectures"] == ["sm_80", "sm_90"]
    assert (found.facts["tf32"], found.facts["driver"]) == (False, "580.65")
    assert gpu.asked == ["use", "cuda:0"]  # what others use is read before this process adds to it


@pytest.mark.parametrize(
    "capability, extra",
    [((7, 0), set()), ((8, 0), {"bfloat16"}), ((8, 9), {"bfloat16", "float8_e4m3fn"})],
)
def test_dtypes_follow_the_capability(gpu, capability, extra):
    """bfloat16 from Ampere on, float8 from Ada on."""
    gpu.properties.major, gpu.properties.minor = capability
    gpu.built = []
    assert device.create_device(PROBE).dtypes == {"float64", "float32", "float16"} | extra


@pytest.mark.parametrize(
    "capability, installed, pays",
    [((9, 0), True, True), ((9, 0), False, False), ((6, 1), True, False)],
)
def test_compiled_blocks_are_the_default(gpu, monkeypatch, capability, installed, pays):
    """They are where torch's compiler works: a GPU that Triton writes for, and Triton."""
    find = importlib.util.find_spec
    module = object() if installed else None
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: module if name == "triton" else find(name, *more),
    )
    gpu.properties.major, gpu.properties.minor = capability
    gpu.built = []
    assert device.create_device(PROBE).facts["compile_pays"] is pays


def test_deterministic_products(gpu, monkeypatch):
    """The workspace of cuBLAS is fixed where that is asked for, and the user's own stays."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # taken back afterwards
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    device.create_device(PROBE)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    device.create_device(PROBE, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    device.create_device(PROBE, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_tf32_is_requested(gpu):
    """Torch's precision of products changes on request alone, and the peak with it."""
    torch.set_float32_matmul_precision("highest")
    plain = device.create_device(PROBE)
    assert torch.get_float32_matmul_precision() == "highest"
    fast = device.create_device(PROBE, CudaSection(tf32=True))
    assert torch.get_float32_matmul_precision() == "high"
    assert (plain.facts["tf32"], fast.facts["tf32"]) == (False, True)
    assert plain.require("peak_flops")("float32") == 51.2e12
    assert fast.require("peak_flops")("float32") == 378e12


def test_tf32_of_the_environment_is_kept_and_reported(gpu):
    """A variable that NVIDIA's containers set is no error, and MFU takes it into account."""
    torch.set_float32_matmul_precision("high")
    found = device.create_device(PROBE)
    assert torch.get_float32_matmul_precision() == "high"
    assert found.facts["tf32"] is True


def test_tf32_needs_a_gpu_that_has_it(gpu):
    """Older GPUs refuse the setting instead of ignoring it."""
    config = Config(plugins={"cuda": CudaSection(tf32=True)})
    assert problems_of(device.create_device(PROBE), config) == []
    gpu.properties.major, gpu.built = 7, []
    old = device.create_device(PROBE)
    (problem,) = problems_of(old, config)
    assert "compute capability 7.0" in problem.why
    assert problems_of(old, Config()) == []


def test_a_torch_for_other_gpus_is_refused(gpu):
    """The device's creation names what torch is built for, where the probe could not."""
    gpu.built = ["sm_75", "sm_80"]
    with pytest.raises(DeviceError) as caught:
        device.create_device(PROBE)
    assert caught.value.what == "torch has no kernels for `NVIDIA H100 PCIe`"
    assert "its compute capability is 9.0" in caught.value.why
    assert "sm_75, sm_80" in caught.value.why


def test_a_gpu_without_memory_left_names_who_has_it(gpu):
    """Processes and their memory, as NVML shows them."""
    gpu.use = BUSY
    gpu.refused = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 bytes")
    with pytest.raises(DeviceError) as caught:
        device.create_device(PROBE)
    assert caught.value.what == "`cuda:0` (NVIDIA H100 PCIe) has no memory left for this process"
    assert "79.0 GiB of 80.0 GiB are in use: process 77 (vllm): 78.0 GiB" in caught.value.why
    gpu.use, gpu.refused = None, RuntimeError("CUDA error: out of memory\nmore")
    with pytest.raises(DeviceError, match="CUDA error: out of memory"):
        device.create_device(PROBE)


@pytest.mark.parametrize(
    "message, hint",
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "nvidia-smi -c DEFAULT"),
        ("CUDA error: no kernel image is available for execution on the device", "built for this"),
        ("CUDA error: unknown error", "nvidia-uvm"),
        ("something else", "lmcore doctor"),
    ],
)
def test_other_errors_of_the_first_use_have_hints(gpu, message, hint):
    """The driver's words and what to do about them."""
    gpu.refused = RuntimeError(f"{message}\nsecond line")
    with pytest.raises(DeviceError) as caught:
        device.create_device(PROBE)
    assert caught.value.why == message
    assert hint in caught.value.hint


def test_a_cudnn_other_than_torchs_is_reported(gpu, monkeypatch):
    """A copy that is found first, as in some containers, is named with the fix."""
    message = (
        "cuDNN version incompatibility: PyTorch was compiled against (9, 20, 0), not (9, 19, 0)"
    )

    def refuse():
        raise RuntimeError(message)

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    with pytest.raises(DeviceError, match="a cuDNN that it was not built with") as caught:
        device.create_device(PROBE)
    assert caught.value.why == message
    assert "`LD_LIBRARY_PATH`" in caught.value.hint


def test_others_memory_is_warned_of(gpu, caplog):
    """A run on a GPU in use logs its processes; on an idle one it logs nothing."""
    with caplog.at_level(logging.WARNING):
        device.create_device(PROBE)
        assert not caplog.records
        gpu.use = GpuUse(80 << 30, 20 << 30, (GpuProcess(5, "python", 19 << 30),))
        device.create_device(PROBE)
    (record,) = caplog.records
    assert "process 5 (python): 19.0 GiB; 60.0 GiB are left" in record.getMessage()


def test_a_probe_without_gpus_is_no_fault(gpu):
    """A device can be created without NVML."""
    found = device.create_device(Probe("cuda", ProbeState.PRESENT, 1))
    assert gpu.asked == ["cuda:0"]
    assert found.facts["driver"] is None


def test_cuda_that_does_not_start_says_why(monkeypatch):
    """Torch's own reason, and what to do about it."""

    def init():
        raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(DeviceError) as caught:
        device.create_device(PROBE)
    assert "Error 802" in caught.value.why
    assert "nvidia-fabricmanager" in caught.value.hint


@pytest.mark.parametrize(
    "message, word",
    [
        ("Error 803: system has unsupported display driver / cuda driver combination", "reboot"),
        ("Error 804: forward compatibility was attempted on non supported HW", "LD_LIBRARY_PATH"),
        ("Torch not compiled with CUDA enabled", "install a torch with CUDA"),
    ],
)
def test_hints_of_faults(message, word):
    """Each error of the driver at the start has a fix."""
    assert word in hint_for(message)


def test_nccl_gets_its_device_and_reports_its_version(monkeypatch):
    """The backend is given the device; its record has the version of the library."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    (found,) = plugin.lmcore_comm_backends()
    assert (found.name, found.device_type, found.needs_device_id) == ("nccl", "cuda", True)
    assert found.available() is None
    assert found.facts == {"nccl": "2.29.7"}


def test_a_torch_without_nccl_says_so(monkeypatch):
    """The reason is shown to users."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert comm.nccl().available() == "torch was built without NCCL"
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert comm.nccl().available() == "torch was built without torch.distributed"


DIVISIONS = "roundup_power2_divisions:[256:1,512:2]"
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": f"expandable_segments:True,{DIVISIONS}"}


@pytest.mark.parametrize(
    "values, env, expected",
    [
        ({}, ENVIRONMENT, ""),
        ({"max_split_size_mb": 64}, {}, "max_split_size_mb:64"),
        (
            {"expandable_segments": False, "garbage_collection_threshold": 0.8},
            ENVIRONMENT,
            f"{DIVISIONS},expandable_segments:False,garbage_collection_threshold:0.8",
        ),
        (
            {"max_split_size_mb": 64},
            ENVIRONMENT,
            f"expandable_segments:True,{DIVISIONS},max_split_size_mb:64",
        ),
    ],
)
def test_options_replace_settings_of_the_environment(values, env, expected):
    """Torch resets what is not given; without an option nothing is set."""
    assert allocator_settings(CudaSection(**values), env) == expected


def test_the_allocator_is_set_before_memory_is_taken(gpu, monkeypatch):
    """Limit and settings reach torch, and the settings are among the facts."""
    calls = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(device, "_claim", lambda *_: calls.append("claim"))
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda *given: calls.append(given),
        raising=False,
    )
    monkeypatch.setattr(
        torch._C,
        "_accelerator_setAllocatorSettings",
        calls.append,
        raising=False,
    )
    settings = CudaSection(memory_fraction=0.5, max_split_size_mb=64)
    found = device.create_device(PROBE, settings)
    assert calls == [(0.5, 0), "max_split_size_mb:64", "claim"]
    assert found.facts["allocator"] == "max_split_size_mb:64"


def test_an_allocator_setting_that_torch_refuses(gpu, monkeypatch):
    """An older torch lacks the function, or refuses the value: the error names the flags."""

    def refuse(_text):
        raise ValueError("no such setting")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    with pytest.raises(DeviceError, match="settings of its allocator") as error:
        device.create_device(PROBE, CudaSection(expandable_segments=True))
    assert "no such setting" in (error.value.why or "")
    assert "`--cuda-expandable-segments`" in (error.value.hint or "")


def test_the_collection_threshold_is_below_one():
    """Torch refuses 1, and so does the option, before a device is there."""
    options = {option.name: option for option in options_of(CudaSection)}
    threshold = options["garbage_collection_threshold"]
    assert threshold.convert("0.8", where="it") == 0.8
    with pytest.raises(ConfigError, match="< 1"):
        threshold.convert("1", where="it")
