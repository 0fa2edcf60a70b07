"""The simulated driver under `torch.xpu`: torch's own functions work over it."""

from __future__ import annotations

import gc

import pytest
import torch
from packaging.version import Version


def test_devices_are_those_of_the_test(xpu):
    """Names, sizes and abilities are the cards'; the current one can be changed."""
    from fake_torch_xpu import GIB, Card

    xpu.cards = [Card(), Card("Intel(R) Arc(TM) B580 Graphics", 12 * GIB, 160, has_fp64=False)]
    assert torch.xpu.is_available()
    assert torch.xpu.device_count() == 2
    torch.xpu.set_device(1)
    assert torch.xpu.current_device() == 1
    assert torch.xpu.get_device_name() == "Intel(R) Arc(TM) B580 Graphics"
    properties = torch.xpu.get_device_properties("xpu:1")
    assert (properties.total_memory, properties.has_fp64) == (12 * GIB, False)
    assert torch.xpu.is_bf16_supported(including_emulation=False)
    assert torch.xpu.get_device_capability(1)["gpu_eu_count"] == 160
    if hasattr(torch.xpu, "can_device_access_peer"):  # not in torch 2.8
        assert torch.xpu.can_device_access_peer(0, 1)
    with torch.xpu.device(0):
        assert torch.xpu.current_device() == 0
    assert torch.xpu.current_device() == 1
    assert torch.distributed.is_xccl_available()
    with pytest.raises(RuntimeError, match="out of range"):
        torch.xpu.set_device(2)


def test_counting_starts_no_device(xpu):
    """A device starts when it is first used, as on hardware."""
    torch.xpu.device_count()
    torch.xpu.manual_seed(3)
    assert "_xpu_init" not in xpu.calls
    torch.xpu.synchronize()
    assert xpu.calls.count("_xpu_init") == 1
    assert torch.xpu.initial_seed() == 3


def test_memory_is_counted(xpu):
    """Tensors count while they live, others' memory is not free, and too much is refused."""
    from fake_torch_xpu import GIB

    (card,) = xpu.cards
    card.used = 63 * GIB
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="xpu")
    assert torch.xpu.memory_allocated() == torch.xpu.memory_reserved() == 1 << 20
    assert torch.xpu.mem_get_info() == (GIB - (1 << 20), 64 * GIB)
    card.used = 64 * GIB - (1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4.00 KiB. GPU 0 has a"):
        torch.zeros(1024, device=torch.device("xpu", 0))
    del tensor
    gc.collect()
    assert torch.xpu.memory_allocated() == 0
    assert torch.xpu.max_memory_allocated() == 1 << 20
    torch.xpu.reset_peak_memory_stats()
    torch.xpu.reset_accumulated_memory_stats()
    torch.xpu.empty_cache()
    assert torch.xpu.max_memory_allocated() == 0


def test_random_numbers_go_on(xpu):
    """The state of a device's generator can be taken and put back."""
    torch.xpu.manual_seed_all(5)
    before = torch.xpu.get_rng_state()
    torch.xpu.default_generators[0].manual_seed(6)
    torch.xpu.set_rng_state(before)
    assert torch.xpu.initial_seed() == 5


def test_faults_are_raised_where_they_happen(xpu):
    """A test names the compiled function that fails."""
    xpu.errors["_xpu_init"] = RuntimeError("level_zero backend failed with error: 38")
    assert torch.xpu.is_available()
    with pytest.raises(RuntimeError, match="error: 38"):
        torch.ones(2, device="xpu")


def test_a_torch_for_the_cpu(xpu):
    """A build without the devices has none, and no XCCL."""
    xpu.compiled = xpu.xccl = False
    assert not torch.xpu.is_available()
    assert not torch.distributed.is_xccl_available()
    with pytest.raises(AssertionError, match="not compiled with XPU"):
        torch.xpu.init()


def test_nothing_is_left_behind():
    """After the tests above torch is the build that it was."""
    assert not torch.xpu._initialized
    assert torch.xpu.default_generators == ()
    assert not hasattr(torch._C, "_xpu_init") or torch._C._has_xpu


def test_an_older_torch_lacks_what_came_later(xpu_of_each_torch):
    """Versions before the installed one have the names and fields of their time."""
    driver = xpu_of_each_torch
    version = Version(torch.__version__.partition("+")[0])
    assert hasattr(torch.xpu, "power_draw") == (version >= Version("2.13"))
    record = torch.xpu.get_device_properties()
    assert hasattr(record, "is_integrated_gpu") == (version >= Version("2.13"))
    assert hasattr(record, "memory_clock_rate") == (version >= Version("2.12"))
    assert sorted(vars(record)) == driver.known
