"""The defaults of `Device.from_torch`: torch's functions for a device type.

Each comes from torch's module of the type (`torch.get_device_module`) or, if that lacks it and the
type is torch's current accelerator, from `torch.accelerator`.  Indices are passed as integers,
which both take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from lmcore.base.errors import DeviceError, PluginError
from lmcore.contract.device_errors import first_line
from lmcore.contract.memory_stats import MemoryStats
from lmcore.contract.torch_versions import ACCELERATOR_GRAPH

__all__ = ["defaults", "memory_info", "own_index", "require_complete"]

_HOST = "cpu"


def own_index(device_type: str) -> int:
    """Return the ordinal of the device that is this process's: its local rank's.

    A type without a module in torch has no count; the ordinal is the local rank then.

    Raises:
        DeviceError: the type is unknown to torch, or there are more processes on this host than
            torch sees devices.
    """
    module = _module(device_type)
    if device_type == _HOST:
        return 0  # all processes are on the one host
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if module is _NoModule:
        return index  # the plugin brings every function, or `require_complete` refuses
    count = _required(device_type, "device_count")()
    if index >= count:
        raise DeviceError(
            f"process {index} of this host has no `{device_type}` device of its own",
            why=f"torch sees {count}",
            hint=_hint_for(count),
        )
    return index


def device_count(device_type: str) -> int:
    """Return the number of devices of a type that torch sees; 1 if it does not know the type."""
    module = getattr(torch, device_type, None)
    count = getattr(module, "device_count", None)
    return max(1, count()) if count is not None and device_type != _HOST else 1


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

    A function of `torch.accelerator` is called once, as it exists for every device and raises for
    one that cannot do it.

    Args:
        device_type: torch's device type.
        index: ordinal on this host.
        brought: attributes that the plugin brings; torch's are not tried for these.

    Returns:
        The arguments.  `missing` has the reason for each optional function that torch lacks, and
        also for each required one (see `require_complete`).

    Raises:
        DeviceError: the type is unknown to torch.
    """
    values: dict[str, Any] = {
        "type": device_type,
        "index": index,
        "name": _name(_module(device_type), index, device_type),
        "dtypes": frozenset({"float32"}),
    }
    missing: dict[str, str] = {}
    if device_type == _HOST:
        values |= _host_functions()
        missing |= _HOST_MISSING
    for name, (attributes, make) in _FUNCTIONS.items():
        if name in brought or name in values or name in missing:
            continue
        try:
            values[name] = make(_Torch(device_type, index, attributes))
        except _LACKING as cause:
            missing[name] = first_line(cause)
    if device_type != _HOST and "new_graph" not in brought:
        try:
            values["new_graph"] = _graph_maker(device_type)
        except (AttributeError, RuntimeError) as cause:
            missing["new_graph"] = first_line(cause)
    missing["peak_flops"] = "the plugin has no figure for this device's peak"
    values["missing"] = missing
    return values


def require_complete(device_type: str, values: Collection[str], missing: Mapping[str, str]) -> None:
    """Raise if a function that every device has is neither torch's nor the plugin's.

    Args:
        device_type: torch's device type.
        values: names of the functions that there are.
        missing: reasons of `defaults`.

    Raises:
        PluginError: It names the function, and what torch lacks.
    """
    for function in _REQUIRED:
        if function not in values:
            hint = f"pass `{function}=` to `Device.from_torch`, or add it to torch's module"
            if _module(device_type) is _NoModule:
                hint = (
                    "import the package that registers the module before the device is created, or "
                    f"pass `index=` and all of {', '.join(f'`{name}=`' for name in _REQUIRED)}"
                )
            raise PluginError(
                f"device `{device_type}` has no `{function}`", why=missing[function], hint=hint
            )


def memory_info(device_type: str, index: int) -> tuple[int, int] | None:
    """Return the free and the total bytes of a device's memory; None if torch cannot read them.

    Args:
        device_type: torch's device type.
        index: ordinal on this host.
    """
    try:
        free, total = _required(device_type, "mem_get_info")(index)
    except (*_LACKING, DeviceError):
        return None
    return int(free), int(total)


class _NoModule:
    """Empty module, for a device type for which torch has none."""


def _module(device_type: str) -> Any:
    try:
        return torch.get_device_module(device_type)
    except (RuntimeError, AttributeError) as cause:
        if _is_type(device_type):
            return _NoModule
        raise DeviceError(
            f"torch {torch.__version__} has no device type `{device_type}`",
            why=first_line(cause),
            hint="import the package that brings it to torch before the device is created",
        ) from cause


def _is_type(device_type: str) -> bool:
    """Return True if torch has tensors of a type, whether or not it has a module for it."""
    try:
        torch.device(device_type)
    except RuntimeError:
        return False
    return True


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


def _name(module: Any, index: int, device_type: str) -> str:
    get_name = getattr(module, "get_device_name", None)
    return str(get_name(index)) if get_name else device_type


def _graph_maker(device_type: str) -> Any:
    """Return torch's class of graphs, which are of torch's accelerator.

    Raises:
        RuntimeError: It has none for the device; the message is the reason.
    """
    if not ACCELERATOR_GRAPH:
        raise RuntimeError(ACCELERATOR_GRAPH.absence)
    if not _is_accelerator(device_type):
        current = torch.accelerator.current_accelerator()
        here = "there is none here"
        if current is not None:
            here = f"here that is `{current.type}`, not `{device_type}`"
        raise RuntimeError(
            "torch captures graphs of its current accelerator alone (`torch.accelerator.Graph`); "
            f"{here}"
        )
    make = torch.accelerator.Graph
    try:
        make()
    except RuntimeError as cause:
        raise RuntimeError(
            f"`torch.accelerator.Graph` cannot be made for `{device_type}`: {first_line(cause)}"
        ) from cause
    return make


_ACCELERATOR = {
    "device_count": "device_count",
    "synchronize": "synchronize",
    "set_device": "set_device_index",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "mem_get_info": "get_memory_info",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "empty_cache": "empty_cache",
}
"""Names in torch's device modules, and the same functions' names in `torch.accelerator`."""

_LACKING = (AttributeError, RuntimeError, TypeError, ValueError, AssertionError)
"""Errors that torch raises for functions that a device lacks."""


def _is_accelerator(device_type: str) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device_type


def _find(device_type: str, name: str) -> Any:
    """Return torch's function of this name for a device type; None if there is none."""
    found = getattr(_module(device_type), name, None)
    if found is None and _is_accelerator(device_type):
        if name in {"Stream", "Event"}:
            return getattr(torch, name)
        found = getattr(torch.accelerator, _ACCELERATOR.get(name, ""), None)
    return found


def _required(device_type: str, name: str) -> Any:
    """Return torch's function of this name for a device type.

    Raises:
        AttributeError: There is none; the message names the module that lacks it.
    """
    found = _find(device_type, name)
    if found is not None:
        return found
    if _module(device_type) is _NoModule:
        raise AttributeError(f"torch has no module `torch.{device_type}`")
    raise AttributeError(f"torch's module of `{device_type}` has no `{name}`")


class _Torch:
    """Torch's functions of one device, from which a function of `Device` is made.

    Attributes:
        index: ordinal on this host.
        device: the device.
        tries: True if a function is of `torch.accelerator`, so that it may raise for this device.
    """

    def __init__(self, device_type: str, index: int, attributes: Collection[str]) -> None:
        """Look up *attributes*.

        Raises:
            AttributeError: Torch lacks one.
        """
        self.index, self.device = index, torch.device(device_type, index)
        module = _module(device_type)
        self.tries = any(not hasattr(module, name) for name in attributes)
        self._functions = {name: _required(device_type, name) for name in attributes}

    def __getitem__(self, name: str) -> Any:
        return self._functions[name]

    def tried(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return *function*, called once before if it is of `torch.accelerator`."""
        if self.tries:
            function()
        return function


def _synchronize(has: _Torch) -> Any:
    return has.tried(lambda: has["synchronize"](has.index))


def _set_state(has: _Torch) -> Any:
    return lambda state: has["set_rng_state"](state, has.index)


def _memory_stats(has: _Torch) -> Any:
    info = memory_info(has.device.type, has.index)

    def read() -> MemoryStats:
        return MemoryStats(
            allocated=has["memory_allocated"](has.index),
            peak_allocated=has["max_memory_allocated"](has.index),
            reserved=has["memory_reserved"](has.index),
            total=info[1] if info else None,
        )

    return has.tried(read)


def _pin_memory(has: _Torch) -> Any:
    if has.tries:
        torch.empty(1).pin_memory()
    return lambda tensor: tensor.pin_memory()


def _new_stream(has: _Torch) -> Any:
    return has.tried(lambda: torch.Stream(has.device))


def _new_event(has: _Torch) -> Any:
    if has.tries:
        torch.Event(has.device).record(torch.accelerator.current_stream(has.device))
    return lambda: torch.Event(has.device)


_REQUIRED = ("synchronize", "set_current", "seed", "get_rng_state", "set_rng_state")

_FUNCTIONS: dict[str, tuple[tuple[str, ...], Callable[[_Torch], Any]]] = {
    "synchronize": (("synchronize",), _synchronize),
    "set_current": (("set_device",), lambda has: lambda: has["set_device"](has.index)),
    "seed": (("manual_seed",), lambda has: has["manual_seed"]),
    "get_rng_state": (("get_rng_state",), lambda has: lambda: has["get_rng_state"](has.index)),
    "set_rng_state": (("set_rng_state",), _set_state),
    "memory_stats": (
        ("memory_allocated", "max_memory_allocated", "memory_reserved"),
        _memory_stats,
    ),
    "reset_peak_memory": (
        ("reset_peak_memory_stats",),
        lambda has: has.tried(lambda: has["reset_peak_memory_stats"](has.index)),
    ),
    "empty_cache": (("empty_cache",), lambda has: has.tried(has["empty_cache"])),
    "pin_memory": (("Stream",), _pin_memory),
    "new_stream": (("Stream",), _new_stream),
    "new_event": (("Event",), _new_event),
}
"""Functions of `Device`, each with the names in torch's module that it needs and its maker."""
