"""One Intel GPU as a `Device`: torch's own functions."""

from __future__ import annotations

from typing import Any

import torch

from lmcore.accelerator import CommBackend, Device
from lmcore.accelerator.torch_device import own_index
from lmcore.errors import DeviceError

__all__ = ["create_device", "xccl"]


def create_device() -> Device:
    """Return the GPU of this process: the one that its local rank names.

    Raises:
        DeviceError: torch cannot use it, or there are more processes than GPUs.
    """
    if not torch.xpu.is_available():
        raise DeviceError(
            "torch finds no usable Intel GPU, though the kernel lists one",
            why=f"torch {torch.__version__}",
            hint="run `lmcore doctor`; GPUs older than PyTorch supports cannot be used",
        )
    # Each tile of a card counts here where Level Zero's hierarchy is flat, its default.
    # Each tile of a card counts here where Level Zero's hierarchy is flat, its default.
    index = own_index("xpu")
    properties = torch.xpu.get_device_properties(index)
    dtypes = {"float32", "float16"}
    if torch.xpu.is_bf16_supported(including_emulation=False):
        dtypes.add("bfloat16")
    if getattr(properties, "has_fp64", False):
        dtypes.add("float64")
    return Device.from_torch(
        "xpu",
        index,
        name=str(properties.name),
        dtypes=frozenset(dtypes),
        facts=_facts(properties),
    )


def _facts(properties: Any) -> dict[str, Any]:
    return {
        "driver": str(properties.driver_version),
        "memory_bytes": int(properties.total_memory),
        "execution_units": int(properties.gpu_eu_count),
        "torch_xpu": getattr(torch.version, "xpu", None),
    }


def xccl() -> CommBackend:
    """Return torch's XCCL backend (oneCCL underneath), which cannot average and is told the device.

    Creating the process group without the device has let sharded training hang.
    """
    return CommBackend(
        name="xccl",
        device_type="xpu",
        available=_why_no_xccl,
        supports_average=False,
        needs_device_id=True,
    )


def _why_no_xccl() -> str | None:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_xccl_available():
        return "torch was built without XCCL"
    return None
