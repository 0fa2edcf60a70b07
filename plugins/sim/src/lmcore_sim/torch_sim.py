"""The module `torch.sim`: what torch and its users expect of a device type's own module.

torch finds it as `torch.get_device_module("sim")`.  Memory, streams and the current device are
torch's functions for any accelerator, which call the library; random numbers are ours.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from lmcore_sim import _C

__all__ = [
    "DeviceProperties",
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "install",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

DeviceLike = torch.device | str | int | None

NAME = "simulated device"
_TYPE = 20  # c10::DeviceType::PrivateUse1


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device: its name, and its bytes of memory."""

    name: str
    total_memory: int


def _index(device: DeviceLike) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    found = torch.device(device)
    if found.type != "sim":
        raise ValueError(f"a sim device is wanted, not `{found}`")
    # Annotated as int, and None where the device has no index.
    return current_device() if found.index is None else found.index  # type: ignore[redundant-expr]


def _device(device: DeviceLike) -> torch.device:
    return torch.device("sim", _index(device))


def is_available() -> bool:
    """Return True if there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return True if devices can be used; they need no initialization."""
    return not _is_in_bad_fork()


def init() -> None:
    """Do nothing: devices need no start."""


def _lazy_init() -> None:
    """Do nothing: devices need no start."""


def _is_in_bad_fork() -> bool:
    return _C.in_forked_process()


def is_bf16_supported(including_emulation: bool = True) -> bool:  # noqa: FBT001, FBT002 - torch's
    """Return True: bfloat16 works."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast can compute in."""
    return [torch.bfloat16, torch.float16]


def device_count() -> int:
    """Return the number of devices of this process."""
    return _C.device_count()


def current_device() -> int:
    """Return the ordinal of the thread's device."""
    return torch.accelerator.current_device_index()


def set_device(device: DeviceLike) -> None:
    """Make a device the thread's."""
    torch.accelerator.set_device_index(_index(device))


class device(contextlib.AbstractContextManager[None]):  # noqa: N801 - torch's name
    """Within the context, a device is the thread's; None or -1: nothing changes."""

    def __init__(self, device: DeviceLike) -> None:
        self.wanted = -1 if device is None else _index(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = current_device()
        if self.wanted >= 0:
            set_device(self.wanted)

    def __exit__(self, *_raised: object) -> None:
        set_device(self.before)


def get_device_name(device: DeviceLike = None) -> str:
    """Return the device's display name."""
    _index(device)
    return NAME


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return name and memory of a device."""
    return DeviceProperties(NAME, mem_get_info(device)[1])


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all work that is queued on a device."""
    torch.accelerator.synchronize(_index(device))


class Stream(torch.Stream):
    """A queue of work of a device."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Self:
        """Make a queue; *priority* has no effect."""
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, _device(device), priority=priority, **kwargs)


def Event(enable_timing: bool = False, **kwargs: Any) -> torch.Event:  # noqa: FBT001, FBT002, N802
    """Make a mark; it can always measure time.

    A function under a class's name: `torch.Event.elapsed_time` takes no object of a subclass.
    """
    return torch.Event(_device(None), enable_timing=enable_timing, **kwargs)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the thread's stream of a device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream that a device has from the start."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_TYPE)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the thread's."""
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make *stream* the thread's within the context; None: change nothing."""
    if stream is None:
        yield
        return
    with stream:
        yield


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes that tensors use."""
    return _C.memory_counts(_index(device))["allocated_bytes.all.current"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes that tensors used at a time."""
    return _C.memory_counts(_index(device))["allocated_bytes.all.peak"]


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes that tensors use or that are kept for them."""
    return _C.memory_counts(_index(device))["reserved_bytes.all.current"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the most bytes that were used or kept at a time."""
    return _C.memory_counts(_index(device))["reserved_bytes.all.peak"]


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    """Return all that the allocator counts."""
    return {**_C.memory_counts(_index(device))}


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return free and total bytes."""
    return _C.memory_info(_index(device))


def empty_cache() -> None:
    """Free the cached memory."""
    _C.free_cached_memory()


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Begin new peaks."""
    _C.reset_peak_memory(_index(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Begin new totals."""
    _C.reset_accumulated_memory(_index(device))


def _generator(device: DeviceLike) -> torch.Generator:
    return _generators()[_index(device)]


def _generators() -> tuple[torch.Generator, ...]:
    count = device_count()
    if len(_known) != count:
        _known[:] = [_C.default_generator(index) for index in range(count)]
    return tuple(_known)


_known: list[torch.Generator] = []


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for generator in _generators():
        generator.manual_seed(seed)


def seed() -> int:
    """Seed the current device's generator with a number that is new each time; return it."""
    return _generator(None).seed()


def seed_all() -> None:
    """Seed the generators of all devices with one number that is new each time."""
    manual_seed_all(seed())


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return _generator(None).initial_seed()


def get_rng_state(device: DeviceLike = None) -> Tensor:
    """Return the state of a device's generator: seed and offset, 16 bytes on the CPU."""
    return _generator(device).get_state()


def set_rng_state(new_state: Tensor, device: DeviceLike = None) -> None:
    """Put a state back."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    """Return the state of each device's generator."""
    return [generator.get_state() for generator in _generators()]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    """Put back what `get_rng_state_all` returned."""
    for generator, state in zip(_generators(), new_states, strict=True):
        generator.set_state(state)


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return _generators()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install() -> ModuleType:
    """Make this module `torch.sim`, once."""
    module = sys.modules[__name__]
    if getattr(torch, "sim", None) is not module:
        torch._register_device_module("sim", module)  # noqa: SLF001 - it has no public name
    return module
