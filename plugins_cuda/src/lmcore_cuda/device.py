"""One GPU as a `Device`: torch's own functions, with what NVIDIA's data sheets and NVML add."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from lmcore.base.errors import DeviceError
from lmcore.contract import Device, Probe, first_line, own_index
from lmcore.contract.op.packages import FACT, describe
from lmcore_cuda.detection.architectures import capability_words, runs_on
from lmcore_cuda.driver.gpu_health import health_of
from lmcore_cuda.driver.gpu_use import GpuUse, in_gib, read_use
from lmcore_cuda.driver.nvml import load_library
from lmcore_cuda.faults import hint_for, is_out_of_memory
from lmcore_cuda.packages import installed_packages
from lmcore_cuda.peaks import peak_flops
from lmcore_cuda.settings import CudaSection, allocator_settings

__all__ = ["create_device"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

_ALLOCATOR = attrgetter("_C._accelerator_setAllocatorSettings")
"""Function that sets torch's allocator: torch has no public one, and older versions none."""
_DEFAULTS = CudaSection()
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FLOAT8 = (8, 9)
"""Compute capability from which on tensor cores multiply float8."""
_TRITON = (7, 0)
"""Compute capability that torch's compiler asks for."""
_MUCH = 0.1
"""Share of memory used by other processes from which on a warning is logged."""


def create_device(
    probe: Probe, settings: CudaSection = _DEFAULTS, *, deterministic: bool = False
) -> Device:
    """Return the GPU of this process: the one of its local rank.

    Args:
        probe: Probe of the launcher.
        settings: Settings of the run: TF32, which applies to the whole process.
        deterministic: True for bitwise reproducible products, in the whole process.

    Raises:
        DeviceError: torch cannot use it, has no kernels for it, or gets no memory there; or there
            are more processes than GPUs.
    """
    if deterministic:  # cuBLAS reads it when it is first used; torch refuses products without it
        os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    _require_cuda()
    index = own_index("cuda")
    allocator = _set_allocator(index, settings)  # before this process has memory there
    use, uuid = _use_of(probe, index), _uuid(probe, index)  # before this process has memory there
    properties = torch.cuda.get_device_properties(index)
    _require_kernels(properties)
    _claim(index, str(properties.name), use)
    _tell_of_others(index, use)
    tf32 = _tf32(settings)
    name = str(properties.name)
    return Device.from_torch(
        "cuda",
        index,
        name=name,
        dtypes=_dtypes((properties.major, properties.minor)),
        peak_flops=lambda dtype: peak_flops(name, dtype, tf32=tf32),
        new_graph=_Graph,
        health=None if uuid is None else health_of(load_library(), uuid),
        facts={**_facts(properties, probe, tf32=tf32), "allocator": allocator},
    )


class _Graph(torch.cuda.CUDAGraph):
    """CUDA graph; other threads, as the loader's, may allocate during a capture.

    torch's graph for all accelerators came with 2.12.
    """

    def capture_begin(self) -> None:  # type: ignore[override]
        """Record the current stream."""
        super().capture_begin(capture_error_mode="thread_local")


def _require_cuda() -> None:
    """See that CUDA starts; torch hides the reason otherwise."""
    if torch.cuda.is_available():
        return
    why = "it gives no reason"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = first_line(error)
    raise DeviceError(
        "torch finds no usable GPU, though the driver lists one",
        why=f"torch {torch.__version__}, built with CUDA {torch.version.cuda}: {why}",
        hint=hint_for(why),
    )


def _set_allocator(index: int, settings: CudaSection) -> str:
    """Set the limit of memory and torch's allocator; return the settings of the latter.

    Raises:
        DeviceError: torch does not accept them.
    """
    try:
        if settings.memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(settings.memory_fraction, index)
        wanted = allocator_settings(settings, os.environ)
        if wanted:
            _ALLOCATOR(torch)(wanted)
    except (AttributeError, RuntimeError, ValueError) as error:
        raise DeviceError(
            "torch does not accept the settings of its allocator",
            why=f"torch {torch.__version__}: {first_line(error)}",
            hint="leave out `--cuda-memory-fraction`, `--cuda-expandable-segments`, "
            "`--cuda-max-split-size-mb` and `--cuda-garbage-collection-threshold`, or use a newer "
            "torch",
        ) from error
    return wanted


def _require_kernels(properties: Any) -> None:
    built: Sequence[str] = torch.cuda.get_arch_list()
    capability = (properties.major, properties.minor)
    if built and not runs_on(capability, built):
        raise DeviceError(
            f"torch has no kernels for `{properties.name}`",
            why=f"its compute capability is {capability_words([capability])}; torch "
            f"{torch.__version__} is built for {', '.join(built)}",
            hint="install another build of torch: `lmcore plugins` has the command",
        )


def _use_of(probe: Probe, index: int) -> GpuUse | None:
    uuid = _uuid(probe, index)
    return None if uuid is None else read_use(load_library(), uuid)


def _uuid(probe: Probe, index: int) -> str | None:
    """Return the UUID of the GPU; None if the probe did not see it."""
    gpus = probe.facts.get("gpus", [])
    return str(gpus[index]["uuid"]) if 0 <= index < len(gpus) else None


def _claim(index: int, name: str, use: GpuUse | None) -> None:
    """Make this process's context on the GPU, with a first block of memory."""
    try:
        torch.empty(1, device=torch.device("cuda", index))
    except RuntimeError as error:  # torch.OutOfMemoryError and AcceleratorError are of this kind
        message = first_line(error)
        if not is_out_of_memory(message):
            raise DeviceError(
                f"`cuda:{index}` ({name}) cannot be used", why=message, hint=hint_for(message)
            ) from error
        raise DeviceError(
            f"`cuda:{index}` ({name}) has no memory left for this process",
            why=use.words if use else message,
            hint="end what uses it (`nvidia-smi` lists it), or choose other GPUs with "
            "`CUDA_VISIBLE_DEVICES`",
        ) from error


def _tell_of_others(index: int, use: GpuUse | None) -> None:
    if use is not None and use.used > _MUCH * use.total:
        logger.warning(
            "`cuda:%d` is used by others: %s; %s are left for this run",
            *(index, use.words, in_gib(use.total - use.used)),
        )


def _dtypes(capability: tuple[int, int]) -> frozenset[str]:
    found = {"float64", "float32", "float16"}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        found.add("bfloat16")
    if capability >= _FLOAT8:
        found.add("float8_e4m3fn")
    return frozenset(found)


def _tf32(settings: CudaSection) -> bool:
    """Set torch's rounding of float32 products to the settings; return True if it does.

    If the settings do not ask for it, the environment's setting stays:
    `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`, which NVIDIA's containers set.
    """
    if settings.tf32:
        # Of torch's interfaces to this, the one that `torch.compile` understands too.
        torch.set_float32_matmul_precision("high")
    return torch.get_float32_matmul_precision() != "highest"


def _facts(properties: Any, probe: Probe, *, tf32: bool) -> Mapping[str, Any]:
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": probe.facts.get("driver"),
        "torch_cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        "architectures": torch.cuda.get_arch_list(),
        "tf32": tf32,
        "compile_pays": _can_compile((properties.major, properties.minor)),
        FACT: describe(installed_packages()),
        "peak_flops": "data sheet, dense" + (", float32 as TF32" if tf32 else ""),
    }


def _cudnn() -> int | None:
    """Return cuDNN's version; torch then checks that it was built with it."""
    try:
        version: int | None = torch.backends.cudnn.version()
    except RuntimeError as error:
        raise DeviceError(
            "torch has loaded a cuDNN that it was not built with",
            why=first_line(error),
            hint="take other copies of cuDNN out of `LD_LIBRARY_PATH`, or install the "
            "`nvidia-cudnn` that torch's metadata requires",
        ) from error
    return version


def _can_compile(capability: tuple[int, int]) -> bool:
    """Return True if torch's compiler works here: it writes Triton, which older GPUs do not run."""
    return capability >= _TRITON and importlib.util.find_spec("triton") is not None
