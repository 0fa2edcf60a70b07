"""Simulated devices whose functions are about the wrong index, or claim too much."""

import dataclasses

import torch

from lmcore.contract import RngTracker
from lmcore_fake.collectives import replace
from lmcore_sim.device import create_device


def create(fake, *, deterministic):
    device = create_device()
    change = globals()[fake.removeprefix("sim-").replace("-", "_")]
    return dataclasses.replace(device, **change(device))


def stagers(device):
    """Leave the device; its stagers are wrong."""
    return {}


def memory_of_0(device):
    first = dataclasses.replace(type(device).from_torch("sim", 0, dtypes=device.dtypes))
    return {"memory_stats": first.memory_stats, "reset_peak_memory": first.reset_peak_memory}


def streams_of_0(device):
    return {"new_stream": lambda: torch.Stream("sim:0")}


def numbers_of_0(device):
    return {
        "get_rng_state": lambda: torch.sim.get_rng_state("sim:0"),
        "set_rng_state": lambda state: torch.sim.set_rng_state(state, "sim:0"),
    }


def pebibyte(device):
    return {"memory_stats": lambda: dataclasses.replace(device.memory_stats(), total=2**50)}


def small_total(device):
    """Claim less memory than can be allocated."""
    return {"memory_stats": lambda: dataclasses.replace(device.memory_stats(), total=2**30)}


def keeps_cache(device):
    """Cache all memory that was ever used, and never give any back."""
    most = [0]

    def stats():
        found = device.memory_stats()
        most[0] = max(most[0], found.reserved)
        return dataclasses.replace(found, reserved=most[0])

    return {"memory_stats": stats, "empty_cache": lambda: None}


def never_current(device):
    return {"set_current": lambda: None}


def constant_memory(device):
    found = device.memory_stats()
    return {"memory_stats": lambda: found}


def half_memory(device):
    """Count half of the memory in use."""

    def stats():
        found = device.memory_stats()
        return dataclasses.replace(found, allocated=found.allocated // 2)

    return {"memory_stats": stats}


def reserves_nothing(device):
    return {"memory_stats": lambda: dataclasses.replace(device.memory_stats(), reserved=0)}


def counts_cache(device):
    """Count the memory of the cache as in use."""

    def stats():
        found = device.memory_stats()
        return dataclasses.replace(found, allocated=found.reserved)

    return {"memory_stats": stats}


def unpinned(device):
    return {"pin_memory": lambda tensor: tensor.clone()}


def always_0(device):
    """Have every process use the first device."""
    first = type(device).from_torch("sim", 0, dtypes=device.dtypes)
    return {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}


def health_waits(device):
    """Wait for all work before the device is called healthy."""

    def health():
        torch.accelerator.synchronize(device.index)

    return {"health": health}


def boundary_waits(device):
    return {"step_boundary": device.synchronize}


def boundary_reads(device):
    """Read a number of the device at each step boundary, which waits for its queue."""
    one = torch.ones(1, device=device.torch_device)
    return {"step_boundary": one.item}


def health_reads_unpinned(device):
    """Read in `health`, on a device without pinned memory."""
    one = torch.ones(1, device=device.torch_device)
    missing = {**device.missing, "pin_memory": "not written yet"}

    def health():
        (one + 1).item()

    return {"health": health, "pin_memory": None, "missing": missing}


def records_once(device):
    """Keep the first record of an event."""

    class Event(torch.Event):
        recorded = False

        def record(self, stream=None):
            if not self.recorded:
                super().record(stream)
            self.recorded = True

    return {"new_event": lambda: Event(device.torch_device)}


class LaunchedWork:
    """A work whose `wait` orders the stream of the launch alone."""

    def __init__(self, work):
        self.work, self.stream = work, torch.accelerator.current_stream()

    def wait(self):
        with self.stream:
            self.work.wait()


def waits_where_launched(device):
    @replace("all_reduce")
    def all_reduce(plain, *arguments, **more):
        work = plain(*arguments, **more)
        return LaunchedWork(work) if work is not None else None

    return {}


def forgets_host(device):
    """Leave the host's generator out of snapshots."""

    class Tracker(RngTracker):
        def snapshot(self):
            return dataclasses.replace(super().snapshot(), host=None)

    return {"new_rng_tracker": lambda: Tracker(device)}
