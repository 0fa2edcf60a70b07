"""`Device`: a frozen record of what one device can do.

A plugin's `lmcore_create_device` returns one, usually from `Device.from_torch`, which takes its
defaults from `torch.accelerator` and `torch.get_device_module`.  The core tests
capabilities, never a name.  A missing capability is `None`, with its reason in `missing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import DeviceError, PluginError, suggestion
from lmcore.contract.compilations import Compilations
from lmcore.contract.device_errors import first_line
from lmcore.contract.memory_stats import MemoryStats
from lmcore.contract.probe import API_VERSION

if TYPE_CHECKING:
    import torch

    from lmcore.contract.generation_kernels import (
        ConstantProjection,
        NextTokenAttention,
        Projection,
    )
    from lmcore.contract.rng import RngTracker

__all__ = ["Device", "own_index"]

_OPTIONAL = (
    "memory_stats",
    "reset_peak_memory",
    "empty_cache",
    "pin_memory",
    "new_stream",
    "new_event",
    "peak_flops",
    "new_graph",
)
_LATER = {"new_graph": "its plugin gives no reason"}
"""Abilities that came after version 1.0 of the contract, and their reason where none is given."""


def own_index(device_type: str) -> int:
    """Return the ordinal of this process's device on its host: the local rank; 0 for the CPU.

    Raises:
        DeviceError: the type is unknown to torch, or there are more processes on this host than
            torch sees devices.
    """
    from lmcore.contract import torch_device

    return torch_device.own_index(device_type)


def _nothing() -> None:
    """Do nothing: work begins when it is queued."""


@dataclass(frozen=True)
class Device:
    """One device of this process and the functions that work on it.

    Attributes:
        type: torch's device type.
        index: Ordinal on this host; 0 for the CPU.
        name: the vendor's name of the device, for messages.
        dtypes: Names of the dtypes that matrix products `x @ w` compute in ("float32", "bfloat16");
            the name of an 8-bit floating-point dtype claims `torch._scaled_mm`.
        synchronize: Wait until all work queued on the device is done.
        set_current: Make this device the process's current one.
        seed: Seed the device's generator (and only that).
        get_rng_state, set_rng_state: The device generator's state, a uint8 CPU tensor.
        memory_stats: Memory now and at the peak.
        reset_peak_memory: Begin a new peak.
        empty_cache: Give cached memory back.
        pin_memory: Return a host tensor in pinned memory.
        new_stream, new_event: Queues and marks of asynchronous work.
        peak_flops: Peak of dense matrix products in FLOP/s for a dtype name, or None if unknown.
        new_graph: Makes an object that records what is queued on a stream between its
            `capture_begin()` and `capture_end()`, and queues all of it at once by `replay()`;
            `reset()` forgets it.  As `torch.accelerator.Graph`, and like that it records work of
            all threads on the stream, draws new random numbers when it is played, and lets other
            threads use the device meanwhile.
        new_rng_tracker: Makes the tracker of the device's random numbers; None: the core's own,
            which needs only the functions above, so that it is never missing.
        constant_projection: Takes a `ConstantProjection` and returns its function, or None where
            torch's own products are as fast or, for a quantized weight, where the device has no
            kernel; the weight is then expanded for each product.  None: it has none.
        next_token_attention: Takes the dtype of queries and cache and the channels of a head, and
            returns the `NextTokenAttention` for them, or None if there is no kernel; None: there
            is never one.
        health: Returns None if the device is healthy, else the reason in one line; it is called
            during a run every `--check-device-interval` steps, and after an error, so that it takes
            milliseconds, and waits for no work on the device.  None: the plugin cannot tell.
        compilations: Returns the programs that the device has compiled in this process so far; both
            numbers only grow.  It is called in the main thread before and after each step, so that
            it takes microseconds, and waits for no work on the device.  None: the device compiles
            nothing while it works, or the plugin cannot tell.
        step_boundary: Runs what a lazy device has recorded, without waiting for it.  It is called
            after each micro-batch's backward pass, after the optimizer, after each evaluation batch
            and each generated token, and before a checkpoint reads tensors.
        inference_mode: False if tensors of `torch.inference_mode` do not work on the device: the
            core uses `torch.no_grad` then.
        compile_backend: Backend that `torch.compile` gets, a name or a function; None: torch's
            default.
        missing: For each optional ability that is None, the reason; also for `compile`
            (`torch.compile`) and `deterministic` (repeatable kernels), if the device lacks them:
            `--compile` and `--deterministic` are refused then, with the reason.
        facts: Versions and properties for `environment.json`, JSON values only.  `compile_pays`,
            if it is true, compiles blocks in runs without `--compile` and `--no-compile`.
    """

    type: str
    index: int
    name: str
    dtypes: frozenset[str]
    synchronize: Callable[[], None]
    set_current: Callable[[], None]
    seed: Callable[[int], None]
    get_rng_state: Callable[[], torch.Tensor]
    set_rng_state: Callable[[torch.Tensor], None]
    memory_stats: Callable[[], MemoryStats] | None = None
    reset_peak_memory: Callable[[], None] | None = None
    empty_cache: Callable[[], None] | None = None
    pin_memory: Callable[[torch.Tensor], torch.Tensor] | None = None
    new_stream: Callable[[], Any] | None = None
    new_event: Callable[[], Any] | None = None
    peak_flops: Callable[[str], float | None] | None = None
    new_rng_tracker: Callable[[], RngTracker] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    new_graph: Callable[[], Any] | None = None
    constant_projection: Callable[[ConstantProjection], Projection | None] | None = None
    next_token_attention: Callable[[torch.dtype, int], NextTokenAttention | None] | None = None
    health: Callable[[], str | None] | None = None
    compilations: Callable[[], Compilations] | None = None
    step_boundary: Callable[[], None] = _nothing
    inference_mode: bool = True
    compile_backend: str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Refuse an absent ability without a reason, and a present ability with one."""
        reasons = {name: why for name, why in _LATER.items() if getattr(self, name) is None}
        object.__setattr__(self, "missing", {**reasons, **self.missing})
        for ability in _OPTIONAL:
            absent = getattr(self, ability) is None
            if absent and not self.missing.get(ability):
                raise PluginError(
                    f"device `{self.type}` lacks `{ability}` and gives no reason",
                    hint=f"pass missing={{'{ability}': 'why'}} where the Device is made",
                )
            if not absent and ability in self.missing:
                raise PluginError(f"device `{self.type}` has `{ability}` and calls it missing")

    @property
    def torch_device(self) -> torch.device:
        """Torch's device, with the index where the type has several."""
        import torch

        ordinal = "" if self.type == "cpu" else f":{self.index}"
        return torch.device(f"{self.type}{ordinal}")

    def require(self, ability: str) -> Callable[..., Any]:
        """Return an optional ability's function.

        Raises:
            DeviceError: The device lacks it; the plugin's reason is given.
        """
        function: Callable[..., Any] | None = getattr(self, ability)
        if function is None:
            raise DeviceError(f"device `{self.type}` has no `{ability}`", why=self.missing[ability])
        return function

    def rng_tracker(self) -> RngTracker:
        """Return a new tracker of the device's random numbers, without streams.

        Raises:
            PluginError: The device's own is not an `RngTracker`.
        """
        from lmcore.contract.rng import RngTracker

        if self.new_rng_tracker is None:
            return RngTracker(self)
        tracker = self.new_rng_tracker()
        if not isinstance(tracker, RngTracker):
            raise PluginError(
                f"device `{self.type}` made {tracker!r:.80} to track its random numbers",
                why="`new_rng_tracker` returns an `RngTracker`",
            )
        return tracker

    def health_problem(self) -> str | None:
        """Return why the device is not healthy; None if it is, or if its plugin cannot tell.

        Raises:
            PluginError: `health` returned something else.
        """
        if self.health is None:
            return None
        try:
            found = self.health()
        except Exception as error:  # noqa: BLE001 - a device that cannot be asked is not healthy
            return f"its health cannot be read: {type(error).__name__}: {first_line(error)}"
        if isinstance(found, str | None):
            return found
        raise PluginError(
            f"device `{self.type}` returned {found!r:.80} from `health`",
            why="it returns None for a healthy device, else the reason as text",
        )

    def compiled_so_far(self) -> Compilations | None:
        """Return the programs compiled in this process so far; None if the device does not tell.

        Raises:
            PluginError: `compilations` returned something else.
        """
        if self.compilations is None:
            return None
        found = self.compilations()
        if isinstance(found, Compilations):
            return found
        raise PluginError(
            f"device `{self.type}` returned {found!r:.80} from `compilations`",
            why="it returns a `Compilations`: number and seconds of the programs compiled so far",
        )

    @classmethod
    def from_torch(cls, device_type: str, index: int | None = None, **overrides: Any) -> Device:
        """Return a device with torch's functions for *device_type*.

        Torch's module of the type is searched first, then `torch.accelerator` if the type is
        torch's current accelerator.

        Args:
            device_type: A type of torch's.  For one without a module `torch.<type>` the plugin
                brings every function that a device must have.
            index: Ordinal on this host; default: local rank of this process.
            **overrides: Attributes that the plugin sets itself; `missing` is merged.

        Raises:
            DeviceError: the type is unknown to torch, or torch has fewer devices than this host has
                processes.
            PluginError: torch lacks something that every device has, and the plugin does not
                bring it; or an attribute is not in this version of the contract.
        """
        from lmcore.contract.torch_device import defaults, require_complete

        _require_known(overrides)
        index = own_index(device_type) if index is None else index
        values = defaults(device_type, index, brought=overrides)
        missing = {**values.pop("missing"), **overrides.pop("missing", {})}
        values.update(overrides)
        require_complete(device_type, values, missing)
        values["missing"] = {name: why for name, why in missing.items() if values.get(name) is None}
        return cls(**values)

    def describe(self) -> dict[str, Any]:
        """Return the record's data (no functions) as JSON values."""
        functions = {f.name for f in dataclasses.fields(self) if callable(getattr(self, f.name))}
        return {
            "type": self.type,
            "index": self.index,
            "name": self.name,
            "dtypes": sorted(self.dtypes),
            "abilities": sorted(name for name in _OPTIONAL if name in functions),
            "missing": dict(self.missing),
            "facts": dict(self.facts),
        }


def _require_known(names: Iterable[str]) -> None:
    """Raise if an attribute is unknown, as one of a later version of the contract is."""
    known = {field.name for field in dataclasses.fields(Device)}
    for name in names:
        if name not in known:
            raise PluginError(
                f"`Device` has no attribute `{name}`",
                why=f"the version of the plugin API is {API_VERSION} here; a later one may have it",
                hint=f"promise that version in `PluginInfo.api`; {suggestion(name, known)}",
            )
