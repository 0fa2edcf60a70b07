"""Functions of torch that the core calls for a device; part of `describe_contract`.

docs/reference/torch-functions.md shows the list.  A test finds the core's calls in its source and
compares them with the list, in both directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["TORCH_NEEDS", "TorchNeed", "describe_torch_needs"]


@dataclass(frozen=True)
class TorchNeed:
    """A function of torch that the core calls.

    Attributes:
        used: use of the function in the core.
        missing: what happens without the function.
        abilities: Attributes of `Device` that need the function; empty: every device does.
        optional: True if a device can do without the function.
        instead: function of torch that is used if the function is missing.
    """

    used: str
    missing: str
    abilities: tuple[str, ...] = ()
    optional: bool = False
    instead: str = ""


def _required(attribute: str, used: str, instead: str = "") -> TorchNeed:
    missing = f"an error at the creation of the device; pass `{attribute}=` to `Device.from_torch`"
    return TorchNeed(used, missing, instead=instead)


def _ability(attribute: str, used: str, instead: str = "") -> TorchNeed:
    missing = f"`Device.{attribute}` is None; pass `{attribute}=` to `Device.from_torch`"
    return TorchNeed(used, missing, (attribute,), instead=instead)


_PREFETCH = ("new_stream", "new_event", "pin_memory")
_NO_FALL_BACK = "an error at the first batch"
_BYTES = "`Device.memory_stats`: bytes in the metrics and in reports of out of memory"
_NO_CAPTURE = "an error with `--step-graph`"

TORCH_NEEDS: Mapping[str, TorchNeed] = {
    "torch.get_device_module": TorchNeed(
        "the module of the device's type, `module` below",
        "an error: torch has no such device type; import the package that registers it",
    ),
    "module.device_count": TorchNeed(
        "`own_index`: the device of each process",
        "an error; pass `index=` to `Device.from_torch`",
        instead="torch.accelerator.device_count",
    ),
    "module.get_device_name": TorchNeed(
        "`Device.name`, for messages", "the name is the type", optional=True
    ),
    "module.set_device": _required(
        "set_current",
        "`Device.set_current`: once in each process",
        "torch.accelerator.set_device_index",
    ),
    "module.synchronize": _required(
        "synchronize",
        "`Device.synchronize`: before copies for a checkpoint are read, and a graph capture",
        "torch.accelerator.synchronize",
    ),
    "module.manual_seed": _required("seed", "`Device.seed`: at the start of a run"),
    "module.get_rng_state": _required(
        "get_rng_state", "`Device.get_rng_state`: dropout, recomputation, checkpoints"
    ),
    "module.set_rng_state": _required(
        "set_rng_state", "`Device.set_rng_state`: dropout, recomputation, checkpoints"
    ),
    "module.memory_allocated": _ability(
        "memory_stats", _BYTES, "torch.accelerator.memory_allocated"
    ),
    "module.max_memory_allocated": _ability(
        "memory_stats", _BYTES, "torch.accelerator.max_memory_allocated"
    ),
    "module.memory_reserved": _ability("memory_stats", _BYTES, "torch.accelerator.memory_reserved"),
    "module.mem_get_info": TorchNeed(
        "`MemoryStats.total`; memory of other processes in reports of out of memory",
        "the total is None",
        ("memory_stats",),
        optional=True,
        instead="torch.accelerator.get_memory_info",
    ),
    "module.reset_peak_memory_stats": _ability(
        "reset_peak_memory",
        "`Device.reset_peak_memory`: checks of peak memory; no run needs it",
        "torch.accelerator.reset_peak_memory_stats",
    ),
    "module.empty_cache": _ability(
        "empty_cache",
        "`Device.empty_cache`: before a graph capture, which has a separate memory pool",
        "torch.accelerator.empty_cache",
    ),
    "module.Stream": _ability(
        "new_stream",
        "sign that the device has streams; `Device.new_stream` and `pin_memory` need it",
        "torch.Stream",
    ),
    "module.Event": _ability(
        "new_event", "sign that the device has events; `Device.new_event` needs it", "torch.Event"
    ),
    "torch.accelerator.current_accelerator": TorchNeed(
        "the device type whose missing functions `torch.accelerator` replaces",
        "no function is replaced",
        optional=True,
    ),
    "torch.Stream": _ability("new_stream", "`Device.new_stream`: `torch.Stream(device)`"),
    "Stream.__enter__": TorchNeed(
        "`with stream:`, to queue copies of batches, and to capture a graph",
        _NO_FALL_BACK,
        _PREFETCH,
    ),
    "Stream.wait_event": TorchNeed(
        "order of the copy of a batch and the computation", _NO_FALL_BACK, _PREFETCH
    ),
    "Stream.wait_stream": TorchNeed(
        "order of a captured graph and other work", _NO_CAPTURE, ("new_graph", "new_stream")
    ),
    "torch.accelerator.current_stream": TorchNeed(
        "stream of the computation, which waits for copies", _NO_FALL_BACK, _PREFETCH
    ),
    "torch.Event": _ability("new_event", "`Device.new_event`: `torch.Event(device)`"),
    "Event.record": TorchNeed(
        "mark behind a copy, on a given or on the current stream; trial at the start of a process",
        "an error when the process starts",
        ("new_event",),
    ),
    "Event.query": TorchNeed("release of host memory whose copy is done", _NO_FALL_BACK, _PREFETCH),
    "Event.synchronize": TorchNeed(
        "reading of loss and gradient norm after their copy; trial at the start of a process",
        "an error when the process starts",
        ("new_event",),
    ),
    "Tensor.pin_memory": _ability(
        "pin_memory", "`Device.pin_memory`: batches, scalars, offloaded activations, checkpoints"
    ),
    "Tensor.is_pinned": TorchNeed(
        "batches of a user's loader: memory that is pinned is not pinned again",
        _NO_FALL_BACK,
        _PREFETCH,
    ),
    "torch.accelerator.Graph": _ability("new_graph", "`Device.new_graph`: `--step-graph`"),
    "Graph.capture_begin": TorchNeed("capture of a step's graph", _NO_CAPTURE, ("new_graph",)),
    "Graph.capture_end": TorchNeed("capture of a step's graph", _NO_CAPTURE, ("new_graph",)),
    "Graph.replay": TorchNeed("replay of a step's graph", _NO_CAPTURE, ("new_graph",)),
    "torch.autocast": TorchNeed(
        "`--precision bf16` and `fp16`, of devices with these `Device.dtypes`: "
        "`torch.autocast(type, dtype=...)` must cast the factors of matrix products",
        "an error when the precision is tested, before the first step",
        ("dtypes",),
    ),
    "torch.amp.is_autocast_available": TorchNeed(
        "proof of the precision of a model's products: is the policy's context autocast",
        "attention may compute in a wider dtype than the policy's",
        optional=True,
    ),
    "torch.is_autocast_enabled": TorchNeed("the same proof", "the same", optional=True),
    "Event.elapsed_time": TorchNeed(
        "each rank's own time of a step, by `torch.Event(device, enable_timing=True)`",
        "the time is not measured, and a slow rank is not named",
        ("new_event",),
        optional=True,
    ),
    "torch.random.fork_rng": TorchNeed(
        "trial of the class of `--optimizer MODULE:CLASS`, which must not change random numbers; "
        "calls `module.get_rng_state` and `set_rng_state`",
        "an error with such an optimizer",
        optional=True,
    ),
    "torch.manual_seed": TorchNeed(
        "the same trial; seeds the device by `module.manual_seed_all` if there is also "
        "`module._is_in_bad_fork`",
        "a warning of torch; the trial draws unseeded numbers on the device",
        optional=True,
    ),
    "torch.distributed.Backend.default_device_backend_map": TorchNeed(
        "the backend of several processes if the plugin lacks `lmcore_comm_backends`",
        "runs have one process",
        optional=True,
    ),
    "torch.distributed.fsdp.fully_shard": TorchNeed(
        "`--zero-stage`; torch calls `module.Stream`, `Event`, `stream` and `current_stream`",
        "an error with this option; close `fsdp` in `conformance.toml`",
        optional=True,
    ),
    "torch.OutOfMemoryError": TorchNeed(
        "error of an allocation that fails: a report of what uses the memory",
        "the allocator's error without the report",
        optional=True,
    ),
    "torch.profiler.supported_activities": TorchNeed(
        "`--profile`: the activity with the name of the type, or `PrivateUse1`",
        "the profile has the host's work only",
        optional=True,
    ),
}
"""The functions, in the order of the page: `module` is the device type's module in torch, `Stream`,
`Event` and `Graph` are what `Device.new_stream`, `new_event` and `new_graph` return."""


def describe_torch_needs() -> dict[str, dict[str, Any]]:
    """Return the list as JSON values."""
    return {
        name: {**dataclasses.asdict(need), "abilities": list(need.abilities)}
        for name, need in TORCH_NEEDS.items()
    }
