"""A driver for `torch.xpu` that computes on the host: torch's own Python code runs over it.

`torch.xpu` is Python over functions of torch's compiled part, `torch._C._xpu_...`, that builds for
the CPU do not have.  `XpuDriver` has them, with the parameters of torch's stubs, over cards that a
test lays out; the functions that users call stay torch's, with their signatures and their order of
starting.  A tensor that a factory such as `torch.empty` makes on the device lies on the host and is
counted against its card's memory; nothing else of it says "xpu".
"""

# ruff: noqa: N802 - names of torch's compiled part

from __future__ import annotations

import functools
import importlib
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.utils._device import _device_constructors

from lmcore.contract import torch_versions

GIB = 1 << 30
FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


@dataclass
class Card:
    """One device that torch sees: a card, or a tile of one.

    Attributes:
        total_memory: Its bytes.
        used: Bytes that other processes have of them.
        properties: More fields of torch's record of a device, in place of a Max 1550's.
    """

    name: str = "Intel(R) Data Center GPU Max 1550"
    total_memory: int = 64 * GIB
    gpu_eu_count: int = 512
    has_fp64: bool = True
    has_fp16: bool = True
    driver_version: str = "1.6.33578+15"
    used: int = 0
    properties: dict[str, Any] = field(default_factory=dict)
    allocated: int = 0
    peak: int = 0

    def fields(self) -> dict[str, Any]:
        """Return every field of torch's record of a device that any version has."""
        return {
            "name": self.name,
            "platform_name": "Intel(R) oneAPI Unified Runtime over Level-Zero",
            "vendor": "Intel(R) Corporation",
            "device_id": 0x0BD5,
            "driver_version": self.driver_version,
            "version": "12.60.7",
            "max_compute_units": self.gpu_eu_count,
            "gpu_eu_count": self.gpu_eu_count,
            "max_work_group_size": 1024,
            "max_num_sub_groups": 64,
            "memory_clock_rate": 3200,
            "memory_bus_width": 64,
            "sub_group_sizes": [16, 32],
            "local_mem_size": 131072,
            "last_level_cache_size": 204 << 20,
            "has_fp16": self.has_fp16,
            "has_fp64": self.has_fp64,
            "has_atomic64": True,
            "has_bfloat16_conversions": True,
            "has_subgroup_matrix_multiply_accumulate": True,
            "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
            "has_subgroup_2d_block_io": True,
            "is_integrated_gpu": False,
            "total_memory": self.total_memory,
            "gpu_subslice_count": self.gpu_eu_count // 8,
            "architecture": 13136561920,
            "type": "gpu",
            "uuid": "8680d50b-2f00-0000-2900-000000000001",
            **self.properties,
        }


class XpuDriver:
    """Driver that `torch.xpu` calls, over *cards*; tests change its attributes.

    Attributes:
        cards: The devices that torch sees.
        errors: By the name of a compiled function ("_xpu_init"), or "allocate": raised when called.
        calls: Names of the compiled functions that ran, "allocate" among them, in order.
        architectures: Architectures of the build's kernels.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recorded: Mapping[str, Any]) -> None:
        """Put the driver under `torch.xpu`; *monkeypatch* takes it away again.

        Args:
            monkeypatch: The test's.
            recorded: Record of the installed version of torch.
        """
        self.monkeypatch, self.recorded = monkeypatch, recorded
        self.known: list[str] = recorded["device_properties"]
        self.cards = [Card()]
        self.errors: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.architectures = "pvc,bmg,dg2"
        self.current = 0
        self.streams = {0: 0}
        self.generators: tuple[torch.Generator, ...] = ()
        self.compiled = True
        self.xccl = True
        self._install()

    def _install(self) -> None:
        put, xpu = self.monkeypatch.setattr, torch.xpu
        functions = self.functions()
        for name, function in functions.items():
            put(torch._C, name, function, raising=False)
        # torch.xpu took these when it was imported.
        put(xpu, "_exchange_device", functions["_xpu_exchangeDevice"])
        put(xpu, "_maybe_exchange_device", functions["_xpu_maybeExchangeDevice"])
        put(xpu, "_get_device_properties", self.record_of, raising=False)
        put(xpu, "_initialized", False)
        put(xpu, "_cached_device_count", None, raising=False)
        put(xpu, "_queued_calls", [])
        put(xpu, "_lazy_seed_tracker", type(xpu._lazy_seed_tracker)())
        put(xpu, "default_generators", ())
        put(torch.version, "xpu", "20250302")
        # Older versions of torch keep even the count; its submodules have functions of their own.
        parts = [part for part in vars(xpu).values() if isinstance(part, ModuleType)]
        for module in (xpu, *(part for part in parts if part.__name__.startswith("torch.xpu."))):
            for name, function in list(vars(module).items()):
                if hasattr(function, "cache_clear"):
                    put(module, name, function.__wrapped__)
        _device_constructors()  # remembers torch's own, which `with torch.device(...)` looks for
        for name in FACTORIES:
            put(torch, name, self.on_device(getattr(torch, name)))

    @property
    def compiled(self) -> bool:
        """Return True if this torch is built for the devices."""
        return bool(torch._C._has_xpu)

    @compiled.setter
    def compiled(self, value: bool) -> None:
        self.monkeypatch.setattr(torch._C, "_has_xpu", value)

    @property
    def xccl(self) -> bool:
        """Return True if this torch has XCCL."""
        return torch.distributed.is_xccl_available()

    @xccl.setter
    def xccl(self, value: bool) -> None:
        self.monkeypatch.setattr(distributed_c10d, "_XCCL_AVAILABLE", value)

    def become(self, version: Mapping[str, Any]) -> None:
        """Remove the names that a recorded version of torch does not have, and use its number.

        Args:
            version: Record of the version.
        """
        for module, names in version["names"].items():
            later = set(self.recorded["names"][module].split()) - set(names.split())
            where = importlib.import_module(module)
            for name in later:
                if isinstance(vars(where).get(name), ModuleType | None):
                    continue  # modules: torch's own code imports, and needs them
                self.monkeypatch.delattr(where, name, raising=False)
        self.known = version["device_properties"]
        self.monkeypatch.setattr(torch, "__version__", f"{version['torch']}+xpu")
        self.monkeypatch.setattr(torch_versions, "_installed", lambda: version["torch"])

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the compiled functions by their names in `torch._C`."""
        return {name: self._watched(name) for name in dir(self) if name.startswith("_xpu_")}

    def _watched(self, name: str) -> Callable[..., Any]:
        function = getattr(self, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.meet(name)
            return function(*args, **kwargs)

        return call

    def meet(self, name: str) -> None:
        """Note a call, and raise the error that a test has set."""
        self.calls.append(name)
        if name in self.errors:
            raise self.errors[name]

    def record_of(self, device: int) -> SimpleNamespace:
        """Return torch's record of a device, with the fields of the imitated version."""
        self.meet("_get_device_properties")
        fields = self._card(device).fields()
        return SimpleNamespace(**{name: fields[name] for name in self.known})

    def allocate(self, device: int, size: int) -> None:
        """Count *size* bytes against a card.

        Raises:
            torch.OutOfMemoryError: It has no more, in torch's words.
        """
        self.meet("allocate")
        card = self._card(device)
        free = card.total_memory - card.used - card.allocated
        if size > free:
            raise torch.OutOfMemoryError(
                f"XPU out of memory. Tried to allocate {_in_words(size)}. GPU {device} has a total "
                f"capacity of {_in_words(card.total_memory)} of which {_in_words(free)} is free. "
                f"Of the allocated memory {_in_words(card.allocated)} is allocated by PyTorch, and "
                "0 bytes is reserved by PyTorch but unallocated. Please use `empty_cache` to "
                "release all unoccupied cached memory."
            )
        card.allocated += size
        card.peak = max(card.peak, card.allocated)

    def _card(self, device: int) -> Card:
        if not 0 <= device < len(self.cards):
            raise RuntimeError(f"The device index is out of range: {device} of {len(self.cards)}")
        return self.cards[device]

    def _free(self, device: int, size: int) -> None:
        self.cards[device].allocated -= size

    def on_device(self, factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a factory that makes tensors of the device on the host, and counts them."""

        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            where = None if device is None else torch.device(device)
            if where is None or where.type != "xpu":
                return factory(*args, **kwargs)
            torch.xpu.init()
            index = self.current if where.index is None else where.index
            made = factory(*args, **{**kwargs, "device": "cpu"})
            self.allocate(index, made.nbytes)
            weakref.finalize(made, self._free, index, made.nbytes)
            return made

        return make

    # What follows has the names and parameters of `torch._C`.

    def _xpu_init(self) -> None:
        if not self.cards:
            raise RuntimeError("No XPU devices are available.")
        self.generators = tuple(torch.Generator() for _ in self.cards)
        torch.xpu.default_generators = self.generators

    def _xpu_getDeviceCount(self) -> int:
        return len(self.cards)

    def _xpu_setDevice(self, device: int) -> None:
        self._card(device)
        self.current = device

    def _xpu_exchangeDevice(self, device: int) -> int:
        before, self.current = self.current, self.current if device < 0 else device
        return before

    def _xpu_maybeExchangeDevice(self, device: int) -> int:
        return self._xpu_exchangeDevice(device)

    def _xpu_getDevice(self) -> int:
        return self.current

    def _xpu_getArchFlags(self) -> str | None:
        return self.architectures.replace(",", " ")

    def _xpu_synchronize(self, device: int) -> None:
        self._card(device)

    def _xpu_emptyCache(self) -> None:
        pass

    def _xpu_memoryStats(self, device: int) -> dict[str, Any]:
        card = self._card(device)
        now = {"current": card.allocated, "peak": card.peak}
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        return {kind: {"all": dict(now)} for kind in kinds}

    def _xpu_resetPeakMemoryStats(self, device: int) -> None:
        self._card(device).peak = self._card(device).allocated

    def _xpu_resetAccumulatedMemoryStats(self, device: int) -> None:
        self._card(device)

    def _xpu_getMemoryInfo(self, device: int) -> tuple[int, int]:
        card = self._card(device)
        return card.total_memory - card.used - card.allocated, card.total_memory

    def _xpu_canDeviceAccessPeer(self, device: int, peer: int) -> bool:
        return self._card(device) is not self._card(peer)

    def _xpu_setStream(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.streams[device_index] = stream_id

    def _xpu_getCurrentStream(self, device: int) -> tuple[int, int, int]:
        return self.streams.get(device, 0), device, 12

    def _xpu_getCurrentRawStream(self, device: int) -> int:
        return self.streams.get(device, 0)


def _in_words(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{math.floor(100 * size / unit) / 100:.2f} {name}"
    return f"{size} bytes"
