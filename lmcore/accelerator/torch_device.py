"""The defaults of `Device.from_torch`: functions that torch's module of a device type has."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch

from lmcore.accelerator.device_errors import first_line
from lmcore.accelerator.memory_stats import MemoryStats
from lmcore.errors import DeviceError, PluginError

__all__ = ["defaults", "own_index", "require_complete"]

_HOST = "cpu"


def own_index(device_type: str) -> int:
    """Return the ordinal of the device that is this process's: its local rank's.

    Raises:
        DeviceError: the type is unknown to torch, or there are more processes on this host than
            torch sees devices.
    """
    module = _module(device_type)
    if device_type == _HOST:
        return 0  # all processes are on the one host
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = module.device_count()
    if index >= count:
        raise DeviceError(
            f"process {index} of this host has no `{device_type}` device of its own",
            why=f"torch sees {count}",
            hint=_hint_for(count),
        )
    return index


def _hint_for(count: int) -> str:
    if count == 0:
        return "`lmcore doctor`"
    if count == 1:
        return (
            "start one process, or let each see all devices: a script around the command that "
            "shows every process one of them is not needed"
        )
    return f"start at most {count} processes on this host"


def defaults(device_type: str, index: int, *, brought: Collection[str] = ()) -> dict[str, Any]:
    """Return constructor arguments of `Device` for a type that torch has a module for.

    Each function is taken from `torch.get_device_module(device_type)` if the module has it, else
    left out; `missing` names the attribute of torch that an optional function lacks.

    Args:
        device_type: torch's device type.
        index: ordinal on this host.
        brought: attributes that the plugin brings; torch's graph is not tried if it is among them.

    Raises:
        DeviceError: the type is unknown to torch.
    """
    module = _module(device_type)
    device = torch.device(device_type, index)
    values: dict[str, Any] = {
        "type": device_type,
        "index": index,
        "name": _name(module, index, device_type),
        "dtypes": frozenset({"float32"}),
    }
    missing: dict[str, str] = {}
    if device_type == _HOST:
        values |= _host_functions()
        missing |= _HOST_MISSING
    else:
        for function, (attribute, make) in _FUNCTIONS.items():
            if hasattr(module, attribute):
                values[function] = make(module, device)
    for ability, attributes, make in _ABILITIES:
        lacking = [name for name in attributes if not hasattr(module, name)]
        if lacking:
            missing[ability] = f"torch's module of `{device_type}` has no `{'`, `'.join(lacking)}`"
        elif ability not in missing:
            values[ability] = make(module, device)
    if device_type != _HOST and "new_graph" not in brought:
        try:
            values["new_graph"] = _graph_maker()
        except (AttributeError, RuntimeError) as cause:
            missing["new_graph"] = first_line(cause)
    missing["peak_flops"] = "the plugin has no figure for this device's peak"
    values["missing"] = missing
    return values


def require_complete(device_type: str, values: Collection[str]) -> None:
    """Raise where a function that every device has is neither torch's nor the plugin's.

    Raises:
        PluginError: It names the function, and what torch's module would have to have.
    """
    for function, (attribute, _) in _FUNCTIONS.items():
        if function not in values:
            raise PluginError(
                f"device `{device_type}` has no `{function}`",
                why=f"torch's module of `{device_type}` has no `{attribute}`",
                hint=f"pass `{function}=` to `Device.from_torch`, or add it to torch's module",
            )


def _module(device_type: str) -> Any:
    try:
        return torch.get_device_module(device_type)
    except (RuntimeError, AttributeError) as cause:
        raise DeviceError(
            f"torch {torch.__version__} has no device type `{device_type}`",
            why=str(cause).splitlines()[0],
            hint="import the package that brings it to torch before the device is created",
        ) from cause


def _host_functions() -> dict[str, Any]:
    # torch's module of the host has neither a generator nor anything to wait for.
    generator = torch.default_generator

    def seed(number: int) -> None:
        generator.manual_seed(number)

    def set_state(state: torch.Tensor) -> None:
        generator.set_state(state)

    return {
        "synchronize": lambda: None,
        "set_current": lambda: None,
        "seed": seed,
        "get_rng_state": generator.get_state,
        "set_rng_state": set_state,
    }


_HOST_MISSING = {
    "pin_memory": "the device is the host itself",
    "new_stream": "work on the host is done when its call returns; there are no queues",
    "new_event": "work on the host is done when its call returns; nothing can be waited for",
    "new_graph": "work on the host is done when its call returns; none is queued",
}

_FUNCTIONS: dict[str, tuple[str, Any]] = {
    "synchronize": ("synchronize", lambda module, device: lambda: module.synchronize(device)),
    "set_current": ("set_device", lambda module, device: lambda: module.set_device(device)),
    "seed": ("manual_seed", lambda module, device: module.manual_seed),
    "get_rng_state": ("get_rng_state", lambda module, device: lambda: module.get_rng_state(device)),
    "set_rng_state": (
        "set_rng_state",
        lambda module, device: lambda state: module.set_rng_state(state, device),
    ),
}
"""Functions that every device has: by `Device`'s attribute, the name in torch's module, and how to
wrap it."""


def _name(module: Any, index: int, device_type: str) -> str:
    get_name = getattr(module, "get_device_name", None)
    return str(get_name(index)) if get_name else device_type


def _graph_maker() -> Any:
    """Return what makes a graph of torch; raises, with the reason, where it has none here."""
    make = torch.accelerator.Graph
    make()
    return make


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
