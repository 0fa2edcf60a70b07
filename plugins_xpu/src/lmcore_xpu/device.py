"""An Intel GPU, or a tile of one, as a `Device`: torch's functions, and abilities that it lacks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from lmcore.base.errors import DeviceError
from lmcore.contract import Device, MemoryStats, Probe, first_line, own_index
from lmcore.contract.op.packages import FACT, Package, describe
from lmcore.contract.torch_versions import TorchCapability
from lmcore_xpu.faults import hint_for, is_out_of_memory
from lmcore_xpu.health import health_of
from lmcore_xpu.kernels import compiler_problem
from lmcore_xpu.packages import TRITON, installed_packages
from lmcore_xpu.peaks import peak_flops
from lmcore_xpu.settings import XpuSection, allocator_settings

__all__ = ["GRAPH", "create_device"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

GRAPH = TorchCapability(
    "graph class of these devices (`torch.xpu.XPUGraph`)",
    "2.11",
    "`--step-graph` is refused",
)
_ALLOCATOR = attrgetter("_C._accelerator_setAllocatorSettings")
"""Function that sets torch's allocator: torch has no public one, and older versions none."""
_MEMORY_FRACTION = attrgetter("xpu.set_per_process_memory_fraction")
"""Function that limits the memory of this process; torch 2.8 has none."""
_DEFAULTS = XpuSection()
_MUCH = 0.1
"""Share of memory used by other processes from which on a warning is logged."""

_PROPERTIES: Mapping[str, str] = {
    "execution_units": "gpu_eu_count",
    "memory_bytes": "total_memory",
    "device_id": "device_id",
    "float64": "has_fp64",
    "bfloat16_conversions": "has_bfloat16_conversions",
    "matrix_engines": "has_subgroup_matrix_multiply_accumulate",
}
"""Facts of a device, by the fields of torch's record of it; torch 2.8 has no `device_id`."""


def create_device(probe: Probe, settings: XpuSection = _DEFAULTS) -> Device:
    """Return the GPU of this process: the one of its local rank.

    If Level Zero's hierarchy is flat, the default, each tile of a card is a device.  In
    deterministic runs nothing is set here: oneDNN follows torch's own setting.

    Args:
        probe: Probe of the launcher.
        settings: Settings of the run: TF32, which applies to the whole process.

    Raises:
        DeviceError: torch cannot use it, or gets no memory there; or there are more processes than
            GPUs.
    """
    _require_xpu()
    index = own_index("xpu")
    allocator = _set_allocator(index, settings)  # before this process has memory there
    properties = torch.xpu.get_device_properties(index)
    name = str(properties.name)
    if not getattr(properties, "is_integrated_gpu", False):  # which has the host's memory
        _tell_of_others(index, name)  # before this process has memory there
    _claim(index, name)
    tf32 = _tf32(settings)
    units = int(properties.gpu_eu_count)
    return Device.from_torch(
        "xpu",
        index,
        name=name,
        dtypes=_dtypes(properties),
        memory_stats=_memory_stats(torch.device("xpu", index), int(properties.total_memory)),
        peak_flops=lambda dtype: peak_flops(name, dtype, execution_units=units, tf32=tf32),
        health=health_of(probe.facts, index),
        **_graph(),
        facts={**_facts(properties, probe, tf32=tf32), "allocator": allocator},
    )


def _graph() -> dict[str, Any]:
    """Return the device's attributes for graph capture."""
    if GRAPH:  # torch's graph class for all accelerators came with 2.12
        return {"new_graph": torch.xpu.XPUGraph}
    return {"missing": {"new_graph": GRAPH.absence}}


def _require_xpu() -> None:
    """See that the GPUs start; torch hides the reason otherwise."""
    if torch.xpu.is_available():
        return
    why = "it gives no reason"
    try:
        torch.xpu.init()
    except (RuntimeError, AssertionError) as error:
        why = first_line(error)
    raise DeviceError(
        "torch finds no usable Intel GPU, though the kernel lists one",
        why=f"torch {torch.__version__}: {why}",
        hint=hint_for(why),
    )


def _set_allocator(index: int, settings: XpuSection) -> str:
    """Set the limit of memory and torch's allocator; return the settings of the latter.

    Raises:
        DeviceError: torch does not accept them.
    """
    try:
        if settings.memory_fraction is not None:
            _MEMORY_FRACTION(torch)(settings.memory_fraction, index)
        wanted = allocator_settings(settings, os.environ)
        if wanted:
            _ALLOCATOR(torch)(wanted)
    except (AttributeError, RuntimeError, ValueError) as error:
        raise DeviceError(
            "torch does not accept the settings of its allocator",
            why=f"torch {torch.__version__}: {first_line(error)}",
            hint="leave out `--xpu-memory-fraction`, `--xpu-expandable-segments`, "
            "`--xpu-max-split-size-mb` and `--xpu-garbage-collection-threshold`, or use a newer "
            "torch",
        ) from error
    return wanted


def _tell_of_others(index: int, name: str) -> None:
    free, total = _free_memory(index)
    if total - free > _MUCH * total:
        logger.warning(
            "`xpu:%d` (%s) is used by others: %.1f GiB of %.1f GiB are left for this run",
            *(index, name, free / 2**30, total / 2**30),
        )


def _free_memory(index: int) -> tuple[int, int]:
    """Return bytes that are free and in all; both 0 if the driver does not report them."""
    try:
        return torch.xpu.mem_get_info(index)
    except RuntimeError:
        return 0, 0


def _claim(index: int, name: str) -> None:
    """Make this process's context on the GPU, with a first block of memory."""
    try:
        torch.empty(1, device=torch.device("xpu", index))
    except RuntimeError as error:  # torch.OutOfMemoryError is of this kind
        message = first_line(error)
        if not is_out_of_memory(message):
            raise DeviceError(
                f"`xpu:{index}` ({name}) cannot be used", why=message, hint=hint_for(message)
            ) from error
        raise DeviceError(
            f"`xpu:{index}` ({name}) has no memory left for this process",
            why=message,
            hint="end what uses it (`xpu-smi ps` lists it), or choose other GPUs with "
            "`ZE_AFFINITY_MASK`",
        ) from error


def _dtypes(properties: Any) -> frozenset[str]:
    """Return the dtypes that the GPU computes in itself; some have no float64."""
    has = {
        "float16": properties.has_fp16,
        "bfloat16": properties.has_bfloat16_conversions,
        "float64": properties.has_fp64,
    }
    return frozenset({"float32", *(name for name, supported in has.items() if supported)})


def _memory_stats(device: torch.device, total: int) -> Callable[[], MemoryStats]:
    """Return a reader of memory statistics; not all drivers report free and total bytes."""

    def read() -> MemoryStats:
        return MemoryStats(
            allocated=torch.xpu.memory_allocated(device),
            peak_allocated=torch.xpu.max_memory_allocated(device),
            reserved=torch.xpu.memory_reserved(device),
            total=total,
        )

    return read


def _tf32(settings: XpuSection) -> bool:
    """Set torch's rounding of float32 products to the settings; return True if it does."""
    mkldnn = torch.backends.mkldnn
    if settings.tf32:
        # For these GPUs oneDNN has a setting of its own, beside that of products of float32.
        mkldnn.allow_tf32 = True  # type: ignore[assignment]  # typed as the property that it is
    return bool(mkldnn.allow_tf32)


def _facts(properties: Any, probe: Probe, *, tf32: bool) -> dict[str, Any]:
    packages = installed_packages()
    return {
        **{fact: getattr(properties, field, None) for fact, field in _PROPERTIES.items()},
        "driver": str(properties.driver_version),
        "kernel_driver": probe.facts.get("driver"),
        "torch_xpu": torch.version.xpu,
        "architectures": torch.xpu.get_arch_list(),
        "tf32": tf32,
        "compile_pays": _can_compile(packages),
        FACT: describe(packages),
        "peak_flops": "product page, dense" + (", float32 as TF32" if tf32 else ""),
    }


def _can_compile(packages: Mapping[str, Package]) -> bool:
    """Return True if torch's compiler works here: it writes Triton, and C++ around it."""
    triton = packages.get(TRITON)
    return triton is not None and triton.problem is None and compiler_problem() is None
