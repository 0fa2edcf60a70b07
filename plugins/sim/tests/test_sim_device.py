"""The device in torch: memory, streams, events, random numbers, pinned memory, saved tensors."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lmcore.contract.torch_versions import ACCELERATOR_MEMORY

MIB = 2**20


@pytest.fixture(params=["torch.sim", "torch.accelerator"])
def memory(request: pytest.FixtureRequest, sim: ModuleType) -> Any:
    """Module with functions that count memory: of the device, and of all accelerators."""
    if request.param == "torch.sim":
        return sim
    if not ACCELERATOR_MEMORY:
        pytest.skip(ACCELERATOR_MEMORY.absence)
    functions = {**vars(torch.accelerator), "mem_get_info": torch.accelerator.get_memory_info}
    return SimpleNamespace(**functions)


def test_memory_is_counted_per_device(memory: Any) -> None:
    """Tensors count on their device while they live; peaks stay until they are reset."""
    before = [memory.memory_allocated(index) for index in range(2)]
    memory.reset_peak_memory_stats(1)
    tensor = torch.empty(MIB, dtype=torch.uint8, device="sim:1")
    assert memory.memory_allocated(1) == before[1] + MIB
    assert memory.memory_allocated(0) == before[0]
    del tensor
    assert memory.memory_allocated(1) == before[1]
    assert memory.max_memory_allocated(1) == before[1] + MIB
    memory.reset_peak_memory_stats(1)
    assert memory.max_memory_allocated(1) == before[1]


def test_freed_memory_is_kept_until_the_cache_is_emptied(memory: Any) -> None:
    """Freed memory stays reserved, is reused for a tensor of its size, and can be released."""
    memory.empty_cache()
    start = memory.memory_reserved()
    place = torch.empty(3 * MIB, dtype=torch.uint8, device="sim").data_ptr()
    assert memory.memory_reserved() == start + 3 * MIB
    assert torch.empty(3 * MIB, dtype=torch.uint8, device="sim").data_ptr() == place
    memory.empty_cache()
    assert memory.memory_reserved() == start


def test_out_of_memory_can_be_recovered_from(memory: Any) -> None:
    """More than there is raises torch's own error, is counted, and leaves the device usable."""
    free, total = memory.mem_get_info()
    assert 0 < free <= total
    counted = memory.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="sim")
    assert memory.memory_stats()["num_ooms"] == counted + 1
    assert torch.ones(3, device="sim").sum().item() == 3


def test_storages_are_resized(memory: Any) -> None:
    """Sharded training frees and refills storages in place; what fits of the content stays."""
    tensor = torch.arange(8.0, device="sim:1")
    storage = tensor.untyped_storage()
    storage.resize_(16)
    storage.resize_(32)
    assert tensor[:4].tolist() == [0, 1, 2, 3]
    before = memory.memory_allocated(1)
    storage.resize_(0)
    assert memory.memory_allocated(1) < before


def test_devices_are_apart(sim: ModuleType) -> None:
    """The current device, the context and the tensors' devices agree."""
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert sim.device_count() == torch.accelerator.device_count() == 2
    with sim.device(1):
        assert torch.empty(1, device="sim").device == torch.device("sim:1")
    assert torch.empty(1, device="sim").device == torch.device("sim:0")
    with pytest.raises(RuntimeError, match="there is no device sim:7"):
        torch.empty(1, device="sim:7")
    moved = torch.arange(3, device="sim:0").to("sim:1")
    assert moved.device.index == 1
    assert moved.tolist() == [0, 1, 2]


def test_copies_from_pinned_memory_are_late(
    sim: ModuleType, misbehave: Callable[[str], None]
) -> None:
    """A copy that may be late is: its target changes after the call, in the order of its stream."""
    source = torch.ones(4).pin_memory()
    target = torch.zeros(4, device="sim")
    back = torch.zeros(4).pin_memory()
    misbehave("slow:copy=400ms")
    begin = time.perf_counter()
    target.copy_(source, non_blocking=True)
    back.copy_(target, non_blocking=True)
    event = torch.Event("sim")
    event.record()
    assert time.perf_counter() - begin < 0.35
    assert back.tolist() == [0, 0, 0, 0]
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert back.tolist() == [1, 1, 1, 1]


def test_ops_wait_for_their_stream(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """An op sees what was queued before it on its own stream."""
    source = torch.ones(4).pin_memory()
    misbehave("slow:copy=50ms")
    target = torch.zeros(4, device="sim")
    target.copy_(source, non_blocking=True)
    assert (target + 1).sum().item() == 8


def test_streams_are_ordered_by_events(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """Another stream runs ahead, unless it waits for an event."""
    source = torch.ones(4).pin_memory()
    target = torch.zeros(4, device="sim")
    side = sim.Stream()
    misbehave("slow:copy@1=50ms")
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        assert sim.current_stream() == side
        target.copy_(source, non_blocking=True)
        done = sim.Event()
        done.record()
    assert sim.current_stream() == sim.default_stream()
    assert target.sum().isnan().item()  # a race, which hardware has too
    sim.current_stream().wait_event(done)
    assert target.sum().item() == 4
    side.synchronize()
    assert side.query()


def test_events_measure_time(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """The time between two events is the time of the work between them."""
    begin, end = (sim.Event(enable_timing=True) for _ in range(2))
    misbehave("slow:exp=20ms")
    begin.record()
    torch.ones(3, device="sim").exp()
    end.record()
    end.synchronize()
    assert 20 <= begin.elapsed_time(end) < 5000


def test_late_failures_surface_at_the_next_wait(
    sim: ModuleType, misbehave: Callable[[str], None]
) -> None:
    """An error in queued work is raised by the call that waits for it."""
    target = torch.zeros(4, device="sim")
    source = torch.ones(4).pin_memory()
    misbehave("fail:copy@1")
    target.copy_(source, non_blocking=True)
    with pytest.raises(RuntimeError, match="copy failed"):
        sim.synchronize()
    sim.synchronize()


def test_each_device_has_its_random_numbers(sim: ModuleType) -> None:
    """Seeds, states and draws of a device leave the CPU's and the other's alone."""
    host = torch.get_rng_state()
    other = sim.get_rng_state("sim:1")
    sim.manual_seed(5)
    state = sim.get_rng_state()
    layer = torch.nn.Dropout(0.5)
    first = [torch.rand(5, device="sim"), layer(torch.ones(64, device="sim"))]
    sim.set_rng_state(state)
    again = [torch.rand(5, device="sim"), layer(torch.ones(64, device="sim"))]
    for before, after in zip(first, again, strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(torch.rand(5, device="sim"), first[0])
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(sim.get_rng_state("sim:1"), other)


def test_generators_of_the_device(sim: ModuleType) -> None:
    """An explicit generator repeats by its seed; one of the CPU is refused."""
    draws = [
        torch.randn(6, device="sim", generator=torch.Generator("sim").manual_seed(3))
        for _ in range(2)
    ]
    assert torch.equal(*draws)
    with pytest.raises(RuntimeError, match="'sim' device type for generator"):
        torch.randn(2, device="sim", generator=torch.Generator())
    torch.manual_seed(9)
    assert [generator.initial_seed() for generator in sim.default_generators] == [9, 9]


@pytest.mark.parametrize("draw", ["rand", "randn", "uniform", "dropout", "bernoulli"])
def test_random_numbers_have_their_distribution(sim: ModuleType, draw: str) -> None:
    """Mean and spread are right, and one op's numbers do not continue another's."""
    count = 40000
    ones = torch.ones(count, device="sim")
    sim.manual_seed(1)

    def numbers() -> torch.Tensor:
        return {
            "rand": lambda: torch.rand(count, device="sim"),
            "randn": lambda: torch.randn(count, device="sim"),
            "uniform": lambda: torch.empty(count, device="sim").uniform_(2, 4),
            "dropout": lambda: torch.nn.functional.dropout(ones, 0.25),
            "bernoulli": lambda: torch.bernoulli(ones * 0.3),
        }[draw]().cpu()

    mean, spread = {
        "rand": (0.5, 12**-0.5),
        "randn": (0.0, 1.0),
        "uniform": (3.0, 2 * 12**-0.5),
        "dropout": (1.0, 3**-0.5),
        "bernoulli": (0.3, 0.21**0.5),
    }[draw]
    first, second = numbers(), numbers()
    assert abs(first.mean().item() - mean) < 5 * spread / count**0.5
    assert abs(first.std().item() - spread) < 0.02 * spread + 0.005
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert abs(correlation) < 5 / count**0.5


def test_pinned_memory(sim: ModuleType) -> None:
    """Pinned tensors say so, also their views; others do not; a data loader can pin."""
    pinned = torch.arange(6.0).pin_memory()
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert not torch.arange(6.0).is_pinned()
    batches = torch.utils.data.DataLoader(torch.arange(8), batch_size=4, pin_memory=True)
    assert all(batch.is_pinned() for batch in batches)
    with pytest.raises(RuntimeError, match="only tensors of the CPU can be pinned"):
        torch.empty(3, device="sim", pin_memory=True)


def test_saved_tensors_come_back(sim: ModuleType) -> None:
    """A file remembers the device; it can be read onto another one, or the CPU."""
    tensor = torch.randn(3, 4, device="sim:1")[1:]
    buffer = io.BytesIO()
    torch.save({"tensor": tensor}, buffer)
    for place, expected in ((None, "sim:1"), ("cpu", "cpu"), ("sim:0", "sim:0")):
        buffer.seek(0)
        found = torch.load(buffer, map_location=place)["tensor"]
        assert found.device == torch.device(expected)
        assert torch.equal(found.cpu(), tensor.cpu())


def test_a_forked_process_is_refused(sim: ModuleType) -> None:
    """The devices' threads stay in the parent; the child gets an error, and does not hang."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(2, device="sim")
            os.write(writer, b"worked")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"forked process" in os.read(reader, 4096)
    assert torch.ones(2, device="sim").sum().item() == 2
