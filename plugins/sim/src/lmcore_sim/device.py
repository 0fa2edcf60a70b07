"""One simulated device as a `Device`: torch's own functions, which the library answers."""

from __future__ import annotations

import torch

from lmcore.accelerator import Device, own_index
from lmcore_sim import (
    torch_backend,  # makes the device known to torch  # noqa: F401
    torch_sim,
)

__all__ = ["create_device"]


def create_device() -> Device:
    """Return the device of this process: the one of its local rank.

    Raises:
        DeviceError: There are more processes on this host than devices.
    """
    index = own_index("sim")
    free, total = torch_sim.mem_get_info(index)
    return Device.from_torch(
        "sim",
        index,
        dtypes=frozenset({"float32", "float64", "bfloat16", "float16"}),
        missing={"peak_flops": "a simulated device has no peak; it is as fast as the host"},
        facts={
            "devices": torch.accelerator.device_count(),
            "memory_bytes": total,
            "free_bytes": free,
            "torch": str(torch.__version__),
        },
    )
