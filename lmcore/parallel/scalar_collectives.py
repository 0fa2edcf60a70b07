"""Collectives of scalars: over all ranks, or per parameter over the ranks that hold its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.parallel.parallel_model import ParallelModel
    from lmcore.runtime.runtime import Runtime

__all__ = [
    "ShardSums",
    "all_gather_scalars",
    "all_reduce_exact",
    "all_reduce_scalars",
    "all_reduce_scalars_on_device",
]


def all_reduce_scalars(runtime: Runtime, *values: float | Tensor) -> list[float]:
    """Return the sum of each number over all ranks; all ranks must call it.

    The sum is in float64 if a tensor is of that dtype, otherwise in float32.  The host waits for
    the device once, for any number of tensors.

    Args:
        runtime: Device and process group.
        values: Numbers, or tensors of one element on the run's device.
    """
    if runtime.processes is None and not any(isinstance(value, Tensor) for value in values):
        return [float(value) for value in values]
    sums: list[float] = all_reduce_scalars_on_device(runtime, *values).tolist()
    return sums


def all_reduce_scalars_on_device(runtime: Runtime, *values: float | Tensor) -> Tensor:
    """Return the sums of `all_reduce_scalars` as a tensor on the device, without host sync.

    Args:
        runtime: Device and process group.
        values: Numbers, or tensors of one element on the run's device.
    """
    wide = any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in values)
    dtype = torch.float64 if wide else torch.float32
    sums = torch.zeros(len(values), dtype=dtype, device=runtime.device.torch_device)
    for index, value in enumerate(values):
        sums[index] = value
    if runtime.processes is not None:
        from torch import distributed

        distributed.all_reduce(sums)
    return sums


def all_gather_scalars(runtime: Runtime, values: Tensor) -> Tensor:
    """Return the numbers of every rank, [world size, n]; all ranks must call it.

    It is an all-reduce in which the other ranks add zeros: every communication backend has that
    one, as the steps need it.

    Args:
        runtime: Device and process group.
        values: This rank's numbers in float32, [n], on the run's device.
    """
    rows = values.new_zeros((runtime.rank.world_size, values.numel()))
    rows[runtime.rank.rank] = values
    if runtime.processes is not None:
        from torch import distributed

        distributed.all_reduce(rows)
    return rows


def all_reduce_exact(runtime: Runtime, values: Tensor) -> Tensor:
    """Return the sums over all ranks of numbers that few ranks have; all ranks must call it.

    Each number is sent as two of float32, so that one that a single rank has, while the others
    have 0, keeps its first 48 bits on every device.

    Args:
        runtime: Device and process group.
        values: Numbers in float64 on the host, [n].

    Returns:
        The sums, in float64 on the host; NaN for numbers that are not finite.
    """
    if runtime.processes is None:
        return values
    from torch import distributed

    high = values.float()
    pair = torch.stack([high, (values - high.double()).float()]).to(runtime.device.torch_device)
    distributed.all_reduce(pair)
    sums: Tensor = pair.cpu().double()
    return sums.sum(dim=0)


class ShardSums:
    """Sums one number per parameter over the ranks that hold shards of it.

    For optimizers that need the norm of a whole parameter; see
    `lmcore.optim.optimizer.SumOverShards`.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        """Collect the process groups; no collective runs yet.

        Args:
            parallel: Model on this rank.
        """
        mesh, layout = parallel.mesh, parallel.mesh.layout
        self._device = parallel.device
        # A shard may be empty on one rank only: indices count the module's parameters.
        names = [name for name, _ in parallel.model.named_parameters()]
        self._index = {name: index for index, name in enumerate(names)}
        self._count = {  # ranks of the tensor axis that hold the same shard
            local.name: mesh.tensor.size if local.replicated else 1 for local in parallel.parameters
        }
        axes = [mesh.tensor, mesh.shards] if layout.zero_stage else [mesh.tensor]
        self._groups = [axis.group for axis in axes if axis.size > 1]
        self._cache: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, names: Sequence[str], values: Tensor) -> Tensor:
        """Return the sums, [len(names)]; all ranks of the tensor and shard axes must call it.

        Args:
            names: Parameters that have a shard on this rank, each once; may differ between ranks.
            values: One number per name, [len(names)]; if there are no names, on any device.
        """
        if not self._groups:
            return values
        from torch import distributed

        values = values.to(self._device)  # groups may accept tensors on the device only
        indices, counts = self._indices_and_counts(tuple(names), values)
        sums = values.new_zeros(len(self._index))
        sums[indices] = values / counts
        for group in self._groups:
            distributed.all_reduce(sums, group=group)
        return sums[indices]

    def _indices_and_counts(self, names: tuple[str, ...], values: Tensor) -> tuple[Tensor, Tensor]:
        """Return both on the device; cached, as a copy from the host waits for the device."""
        if names not in self._cache:
            indices = torch.tensor([self._index[name] for name in names], dtype=torch.long)
            counts = values.new_tensor([self._count[name] for name in names])
            self._cache[names] = indices.to(values.device), counts
        return self._cache[names]
