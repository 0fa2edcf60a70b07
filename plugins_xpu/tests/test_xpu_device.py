"""Creation of the device over a simulated driver; torch's own code runs over it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fake_torch_xpu import GIB, Card
from torch.profiler import ProfilerActivity

from lmcore.base.errors import DeviceError
from lmcore.config.section import Config
from lmcore.contract import MemoryStats, Probe, ProbeState
from lmcore.contract.op.packages import FACT, Package
from lmcore.train.report.profiler import activities_of
from lmcore_xpu import device, kernels, plugin
from lmcore_xpu.device import create_device
from lmcore_xpu.faults import hint_for, is_out_of_memory
from lmcore_xpu.packages import TRITON
from lmcore_xpu.settings import XpuSection

PROBE = Probe("xpu", ProbeState.PRESENT, 1, facts={"driver": "xe of Linux 6.8.0"})
ARC = {"name": "Intel(R) Arc(TM) A770 Graphics", "gpu_eu_count": 512, "total_memory": 16 * GIB}


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Package]:
    """Leave packages to the test."""
    found: dict[str, Package] = {}
    monkeypatch.setattr(device, "installed_packages", lambda: found)
    return found


def test_a_card_becomes_a_device(xpu: Any) -> None:
    """Abilities are torch's; name, dtypes, peak and facts are the card's."""
    found = create_device(PROBE)
    assert (found.type, found.index) == ("xpu", 0)
    assert found.name == "Intel(R) Data Center GPU Max 1550"
    assert found.dtypes == {"float64", "float32", "float16", "bfloat16"}
    assert found.missing.keys() == (set() if device.GRAPH else {"new_graph"})
    facts = found.facts
    assert (facts["execution_units"], facts["memory_bytes"]) == (512, 64 * GIB)
    assert (facts["driver"], facts["kernel_driver"]) == ("1.6.33578+15", "xe of Linux 6.8.0")
    assert (facts["float64"], facts["tf32"], facts["compile_pays"]) == (True, False, False)
    assert facts["architectures"] == ["pvc", "bmg", "dg2"]
    assert facts[FACT] == {}


def test_every_supported_torch(xpu_of_each_torch: Any) -> None:
    """A device is made under each version of torch, with what that has."""
    found = create_device(PROBE)
    assert found.dtypes == {"float64", "float32", "float16", "bfloat16"}
    assert found.require("memory_stats")().total == 64 * GIB


def test_a_tile_has_its_share_of_the_peak(xpu: Any) -> None:
    """In the flat hierarchy a device is half of a Max 1550."""
    tile = create_device(PROBE).require("peak_flops")("bfloat16")
    xpu.cards = [Card(gpu_eu_count=1024)]
    peak = create_device(PROBE).require("peak_flops")("bfloat16")
    assert peak == pytest.approx(838.9e12)
    assert tile == pytest.approx(peak / 2)


@pytest.mark.parametrize(
    "card, dtypes",
    [
        (Card(**ARC, has_fp64=False), {"float32", "float16", "bfloat16"}),
        (Card(**ARC, properties={"has_bfloat16_conversions": False}),
         {"float32", "float16", "float64"}),
        (Card(**ARC, has_fp16=False, has_fp64=False), {"float32", "bfloat16"}),
    ],
)  # fmt: skip
def test_dtypes_follow_the_card(xpu: Any, card: Card, dtypes: set[str]) -> None:
    """Some cards have no float64, which is then not promised, and not asked for."""
    xpu.cards = [card]
    assert create_device(PROBE).dtypes == dtypes


def test_each_process_has_its_own(xpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local rank names the device, whatever the current one is; one too many is an error."""
    xpu.cards = [Card(), Card(**ARC, has_fp64=False)]
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = create_device(PROBE)
    assert (found.index, found.torch_device) == (1, torch.device("xpu", 1))
    assert "float64" not in found.dtypes
    assert xpu.current == 0
    found.set_current()
    assert xpu.current == 1
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(DeviceError, match="has no `xpu` device of its own"):
        create_device(PROBE)


def test_memory_is_read_where_the_driver_does_not_tell_what_is_free(xpu: Any) -> None:
    """Some drivers do not tell; the card's record has the sum, and nobody is said to use it."""
    xpu.errors["_xpu_getMemoryInfo"] = RuntimeError("The device doesn't support querying")
    found = create_device(PROBE)
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=found.torch_device)
    stats = found.require("memory_stats")()
    assert stats == MemoryStats(1 << 20, 1 << 20, 1 << 20, 64 * GIB)
    del kept


def test_random_numbers_and_waiting(xpu: Any) -> None:
    """Seed and state go to this device's generator; waiting is for this device."""
    found = create_device(PROBE)
    found.seed(3)
    state = found.get_rng_state()
    found.seed(4)
    found.set_rng_state(state)
    assert torch.xpu.initial_seed() == 3
    found.synchronize()
    assert "_xpu_synchronize" in xpu.calls


def test_others_memory_is_warned_of(xpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A run on a card in use logs the free memory; on an idle one it logs nothing."""
    with caplog.at_level(logging.WARNING):
        create_device(PROBE)
        assert not caplog.records
        xpu.cards[0].used = 20 * GIB
        create_device(PROBE)
        (record,) = caplog.records
        assert "44.0 GiB of 64.0 GiB are left for this run" in record.getMessage()
        xpu.cards[0].properties["is_integrated_gpu"] = True  # the host's memory is all programs'
        create_device(PROBE)
        assert len(caplog.records) == (1 if "is_integrated_gpu" in xpu.known else 2)


@pytest.mark.parametrize(
    "message",
    [
        None,
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    ],
)
def test_no_memory_left(xpu: Any, message: str | None) -> None:
    """A full card is recognised by torch's or Level Zero's message; the hint names a tool."""
    if message is None:
        xpu.cards[0].used = 64 * GIB
    else:
        xpu.errors["allocate"] = RuntimeError(f"{message}\nmore")
    with pytest.raises(DeviceError) as caught:
        create_device(PROBE)
    assert caught.value.what == (
        "`xpu:0` (Intel(R) Data Center GPU Max 1550) has no memory left for this process"
    )
    assert message is None or caught.value.why == message
    assert "xpu-smi ps" in str(caught.value.hint)


@pytest.mark.parametrize(
    "error, why, hint",
    [
        (RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)\n"),
         "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", "dmesg"),
        (RuntimeError("UR error"), "UR error", "setvars.sh"),
        (RuntimeError(""), "RuntimeError", "lmcore doctor"),
    ],
)  # fmt: skip
def test_other_errors_of_the_first_use(xpu: Any, error: Exception, why: str, hint: str) -> None:
    """The driver's words and what to do about them."""
    xpu.errors["allocate"] = error
    with pytest.raises(DeviceError) as caught:
        create_device(PROBE)
    assert caught.value.what.endswith("cannot be used")
    assert caught.value.why == why
    assert hint in str(caught.value.hint)


def test_a_torch_for_the_cpu(xpu: Any) -> None:
    """A build without the devices says so, and where the right one is."""
    xpu.compiled = False
    with pytest.raises(DeviceError) as caught:
        create_device(PROBE)
    assert "Torch not compiled with XPU enabled" in str(caught.value.why)
    assert "lmcore plugins" in str(caught.value.hint)


def test_gpus_that_are_hidden(xpu: Any) -> None:
    """No device where the kernel lists one: the two variables that hide them are named."""
    xpu.cards = []
    with pytest.raises(DeviceError) as caught:
        create_device(PROBE)
    assert "No XPU devices are available" in str(caught.value.why)
    assert "ONEAPI_DEVICE_SELECTOR" in str(caught.value.hint)


def test_a_torch_that_gives_no_reason(xpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a message of torch the error still has a hint."""
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(DeviceError) as caught:
        create_device(PROBE)
    assert "it gives no reason" in str(caught.value.why)
    assert caught.value.hint == "run `lmcore doctor`"


@pytest.mark.parametrize(
    "message, word",
    [
        ("Required aspect fp64 is not supported on the device", "float64"),
        ("Cannot re-initialize XPU in forked subprocess.", "does not fork"),
        ("oneCCL: ze_handle_manager: pidfd is not supported", "CCL_ZE_IPC_EXCHANGE=sockets"),
        ("something else", "lmcore doctor"),
    ],
)
def test_hints(message: str, word: str) -> None:
    """Each known error has a fix."""
    assert word in hint_for(message)
    assert not is_out_of_memory(message)


def test_tf32_is_requested(xpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN's setting changes on request alone, and the peak of float32 with it."""
    allowed = [False]

    class Setting:
        allow_tf32 = property(lambda self: allowed[0], lambda self, value: allowed.append(value))

    monkeypatch.setattr(device.torch.backends, "mkldnn", Setting())
    plain = create_device(PROBE)
    assert allowed == [False]
    allowed[0] = True
    fast = create_device(PROBE, XpuSection(tf32=True))
    assert allowed == [True, True]
    assert (plain.facts["tf32"], fast.facts["tf32"]) == (False, True)
    assert plain.require("peak_flops")("float32") == pytest.approx(26.2e12)
    assert fast.require("peak_flops")("float32") == pytest.approx(209.7e12)


def test_torchs_name_of_that_setting() -> None:
    """Torch has the setting under the name that is used here, and it is off."""
    assert not torch.backends.mkldnn.allow_tf32
    assert hasattr(torch._C, "_set_onednn_allow_tf32")


@pytest.mark.parametrize(
    "package, compiler, pays",
    [
        (None, "/usr/bin/g++", False),
        (Package("3.7.2"), "/usr/bin/g++", True),
        (Package("3.7.2"), None, False),
        (Package("3.7.2", "is for other GPUs"), "/usr/bin/g++", False),
    ],
)
def test_compiled_blocks_are_the_default(
    xpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    nothing_is_installed: dict[str, Package],
    package: Package | None,
    compiler: str | None,
    pays: bool,
) -> None:
    """They are where torch's compiler works: Triton for these GPUs, and a C++ compiler."""
    if package is not None:
        nothing_is_installed[TRITON] = package
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: compiler and name in compiler)
    assert create_device(PROBE).facts["compile_pays"] is pays


def test_the_hook_passes_the_settings_on(xpu: Any) -> None:
    """The device of a run is made from the launcher's probe and the run's settings."""
    made = plugin.lmcore_create_device(PROBE, Config())
    assert made.facts["kernel_driver"] == "xe of Linux 6.8.0"
    assert made.facts["tf32"] is False


def test_the_profiler_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--profile` records the host and these devices, where torch's build of its profiler can."""
    host, own = ProfilerActivity.CPU, ProfilerActivity.XPU
    monkeypatch.setattr("torch.profiler.supported_activities", lambda: {host, own})
    assert activities_of("xpu") == [host, own]


def test_the_allocator_is_set_before_memory_is_taken(
    xpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit and settings reach torch, and the settings are among the facts."""
    calls = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(device, "_claim", lambda *_: calls.append("claim"))
    monkeypatch.setattr(
        torch.xpu,
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
    settings = XpuSection(memory_fraction=0.5, max_split_size_mb=64)
    found = create_device(PROBE, settings)
    assert calls == [(0.5, 0), "max_split_size_mb:64", "claim"]
    assert found.facts["allocator"] == "max_split_size_mb:64"


def test_an_allocator_setting_that_torch_refuses(xpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older torch lacks the function, or refuses the value: the error names the flags."""

    def refuse(_text: str) -> None:
        raise ValueError("no such setting")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    with pytest.raises(DeviceError, match="settings of its allocator") as error:
        create_device(PROBE, XpuSection(expandable_segments=True))
    assert "no such setting" in (error.value.why or "")
    assert "`--xpu-expandable-segments`" in (error.value.hint or "")
