"""The defaults of `Device.from_torch`: what torch knows of a device type by itself."""

from __future__ import annotations

import os
from typing import Any

import torch

from lmcore.accelerator.device import MemoryStats
from lmcore.errors import DeviceError

__all__ = ["defaults", "own_index"]


def own_index(device_type: str) -> int:
    """Return the ordinal of the device that is this process's: its local rank's.

    Raises:
        DeviceError: There are more processes on this host than torch sees devices.
    """
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.get_device_module(device_type).device_count()
    if index >= count:
        raise DeviceError(
            f"process {index} of this host has no `{device_type}` device of its own",
            why=f"torch sees {count}",
            hint=f"start at most {count} processes on this host" if count else "`lmcore doctor`",
        )
    return index


def defaults(device_type: str, index: int) -> dict[str, Any]:
    """Return constructor arguments of `Device` for a type that torch has a module for.

    Each ability is taken from `torch.get_device_module(device_type)` where that has it; where it
    has not, the ability stays out and `missing` names the attribute that was looked for.
    """
    module = torch.get_device_module(device_type)
    device = torch.device(device_type, index)
    values: dict[str, Any] = {
        "type": device_type,
        "index": index,
        "name": _name(module, index, device_type),
        "dtypes": frozenset({"float32"}),
        "synchronize": lambda: module.synchronize(device),
        "set_current": lambda: module.set_device(device),
        "seed": module.manual_seed,
        "get_rng_state": lambda: module.get_rng_state(device),
        "set_rng_state": lambda state: module.set_rng_state(state, device),
    }
    missing: dict[str, str] = {}
    for ability, attributes, make in _ABILITIES:
        lacking = [name for name in attributes if not hasattr(module, name)]
        if lacking:
            missing[ability] = f"torch's module of `{device_type}` has no `{'`, `'.join(lacking)}`"
        else:
            values[ability] = make(module, device)
    missing["peak_flops"] = "the plugin does not know this device's peak"
    values["missing"] = missing
    return values


def _name(module: Any, index: int, device_type: str) -> str:
    get_name = getattr(module, "get_device_name", None)
    return str(get_name(index)) if get_name else device_type


def _memory_stats(module: Any, device: torch.device) -> Any:
    def read() -> MemoryStats:
        get_info = getattr(module, "mem_get_info", None)
        return MemoryStats(
            allocated=module.memory_allocated(device),
            peak_allocated=module.max_memory_allocated(device),
            reserved=module.memory_reserved(device),
            total=get_info(device)[1] if get_info else None,
        )

    return read


_ABILITIES: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    (
        "memory_stats",
        ("memory_allocated", "max_memory_allocated", "memory_reserved"),
        _memory_stats,
    ),
    (
        "reset_peak_memory",
        ("reset_peak_memory_stats",),
        lambda module, device: lambda: module.reset_peak_memory_stats(device),
    ),
    ("empty_cache", ("empty_cache",), lambda module, device: module.empty_cache),
    (
        "pin_memory",
        ("Stream",),
        lambda module, device: lambda tensor: tensor.pin_memory(),
    ),
    ("new_stream", ("Stream",), lambda module, device: lambda: torch.Stream(device)),
    ("new_event", ("Event",), lambda module, device: lambda: torch.Event(device)),
)
