"""One GPU as a `Device`: torch's own functions, with what NVIDIA's data sheets add."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from lmcore.accelerator import CommBackend, Device
from lmcore.accelerator.torch_device import own_index
from lmcore.errors import DeviceError

__all__ = ["create_device", "nccl", "peak_flops"]

_PEAK_TFLOPS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("H200", {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9}),
    ("H100 PCIe", {"bfloat16": 756.0, "float16": 756.0, "float32": 51.2}),
    ("H100", {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9}),
    ("A100", {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5}),
    ("L40S", {"bfloat16": 362.0, "float16": 362.0, "float32": 91.6}),
    ("L4", {"bfloat16": 121.0, "float16": 121.0, "float32": 30.3}),
)
"""Dense products in 10^12 FLOP/s from NVIDIA's data sheets, by words of the name; float32 as
torch computes it by default, without TF32."""


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the peak of a GPU by its name in FLOP/s; None where no figure is known."""
    for part, rates in _PEAK_TFLOPS:
        if re.search(rf"\b{part}\b", name):
            return rates[dtype] * 1e12 if dtype in rates else None
    return None


def create_device() -> Device:
    """Return the GPU of this process: the one that its local rank names.

    Raises:
        DeviceError: torch cannot use it, or there are more processes than GPUs.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "torch finds no usable GPU, though the driver lists one",
            why=f"torch {torch.__version__}, built with CUDA {torch.version.cuda}",
            hint="run `lmcore doctor`",
        )
    index = own_index("cuda")
    properties = torch.cuda.get_device_properties(index)
    name = str(properties.name)
    dtypes = {"float64", "float32", "float16"}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        dtypes.add("bfloat16")
    return Device.from_torch(
        "cuda",
        index,
        name=name,
        dtypes=frozenset(dtypes),
        peak_flops=lambda dtype: peak_flops(name, dtype),
        facts=_facts(properties),
    )


def _facts(properties: Any) -> dict[str, Any]:
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "peak_flops": "data sheet, dense, without TF32",
    }


def nccl() -> CommBackend:
    """Return torch's NCCL backend; it is told the device, so that no two ranks share one."""
    return CommBackend(
        name="nccl", device_type="cuda", available=_why_no_nccl, needs_device_id=True
    )


def _why_no_nccl() -> str | None:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_nccl_available():
        return "torch was built without NCCL"
    return None
