"""One simulated device as a `Device`: torch's own functions, which the library answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import torch

from lmcore.contract import Device, first_line, own_index
from lmcore_sim import (
    torch_backend,  # makes the device known to torch  # noqa: F401
    torch_sim,
)
from lmcore_sim.settings import read_settings

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
        health=_health(index),
        missing={
            "peak_flops": "a simulated device has no peak; it is as fast as the host",
            "compile": "torch's compiler has no code generator for it",
        },
        facts={
            "devices": torch.accelerator.device_count(),
            "memory_bytes": total,
            "free_bytes": free,
            "torch": str(torch.__version__),
        },
    )


def _health(index: int) -> Callable[[], str | None]:
    """Return the health check of a device: it fails if the device is lost, or by a fault."""
    faulty_from = read_settings(os.environ).faults.unhealthy_from(os.environ)
    device, calls = torch.device("sim", index), itertools.count(1)

    def check() -> str | None:
        try:
            torch.empty(1, device=device)
        except RuntimeError as error:
            return first_line(error)
        if faulty_from is not None and next(calls) >= faulty_from:
            return "LMCORE_SIM_FAULTS says so"
        return None

    return check
