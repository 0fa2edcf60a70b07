"""Small exchanges of all processes of a run: sums of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["sum_of_all"]


def sum_of_all(runtime: Runtime, *values: float) -> list[float]:
    """Return the sum of each number over all processes, in float32; all must call it."""
    if runtime.processes is None:
        return list(values)
    from torch import distributed

    shared = torch.tensor(values, dtype=torch.float32, device=runtime.device.torch_device)
    distributed.all_reduce(shared)
    found: list[float] = shared.tolist()
    return found
