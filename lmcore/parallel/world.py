"""Small exchanges of all processes of a run: sums of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["device_sum_of_all", "sum_of_all"]


def sum_of_all(runtime: Runtime, *values: float | Tensor) -> list[float]:
    """Return the sum of each number over all processes; all must call it.

    Sums are of float32, or float64 where a tensor is.  Whatever is on the device comes to the host
    at once: this waits for the device a single time.

    Args:
        runtime: The run.
        values: Numbers, or tensors of one on the run's device.
    """
    if runtime.processes is None and not any(isinstance(one, Tensor) for one in values):
        return [float(one) for one in values]
    found: list[float] = device_sum_of_all(runtime, *values).tolist()
    return found


def device_sum_of_all(runtime: Runtime, *values: float | Tensor) -> Tensor:
    """Return the same sums on the device, for which nobody waits; all must call it.

    Args:
        runtime: The run.
        values: See `sum_of_all`.
    """
    wide = any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in values)
    dtype = torch.float64 if wide else torch.float32
    shared = torch.zeros(len(values), dtype=dtype, device=runtime.device.torch_device)
    for place, one in enumerate(values):
        shared[place] = one  # on the device: nobody waits
    if runtime.processes is not None:
        from torch import distributed

        distributed.all_reduce(shared)
    return shared
