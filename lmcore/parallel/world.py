"""Small exchanges of all processes of a run: sums of numbers, tensors of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["gather_from_all", "sum_of_all"]


def sum_of_all(runtime: Runtime, *values: float) -> list[float]:
    """Return the sum of each number over all processes, in float32; all must call it."""
    if runtime.processes is None:
        return list(values)
    from torch import distributed

    shared = torch.tensor(values, dtype=torch.float32, device=runtime.device.torch_device)
    distributed.all_reduce(shared)
    found: list[float] = shared.tolist()
    return found


def gather_from_all(runtime: Runtime, values: Tensor) -> list[Tensor]:
    """Return every process's tensor, in the order of ranks, on the host; all must call it.

    Args:
        runtime: The run.
        values: Of the same shape and dtype in all processes, on the host.
    """
    if runtime.processes is None:
        return [values]
    from torch import distributed

    own = values.to(runtime.device.torch_device)
    found = [torch.empty_like(own) for _ in range(runtime.rank.world_size)]
    distributed.all_gather(found, own)
    return [one.cpu() for one in found]
