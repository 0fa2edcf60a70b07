"""`ParallelMesh`: the process groups of each parallel axis, and this rank's index in them.

Ranks are numbered as in `ParallelLayout`.  An axis of the mesh may join several of the layout's:
the replicas of a weight, for example, differ in data and context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lmcore.parallel.wait_clock import WaitClock
from lmcore.runtime.process.collective_trace import PIPELINE

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from lmcore.config.derived.layout import ParallelLayout
    from lmcore.runtime.runtime import Runtime

__all__ = ["Axis", "ParallelMesh", "ReplicaClass"]

_PIPELINE, _REPLICA, _SHARD, _CONTEXT, _TENSOR = range(5)


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as seen by this rank.

    Attributes:
        rank: Index of this rank on the axis.
        size: Number of ranks on the axis.
        ranks: Global ranks on the axis, in order.
        group: Process group of the axis; None if its size is 1.
        clock: Clock of the waits in its collectives.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None
    clock: WaitClock = field(default_factory=WaitClock, compare=False)


@dataclass(frozen=True)
class ReplicaClass:
    """Tensors that are replicated over the same axes.

    Attributes:
        groups: Ranks that hold the same parts of them, [groups, replicas].
        parameters: This rank's parts by name; ranks of one group have the same names.
    """

    groups: npt.NDArray[np.int64]
    parameters: Mapping[str, Tensor]


class ParallelMesh:
    """Axes of a run; all ranks must construct it, as all ranks create all process groups.

    Attributes:
        layout: Size of each axis.
        rank: Global rank of this process.
        tensor: Ranks that split every layer.
        context: Ranks that split every sequence.
        pipeline: Ranks that split the layers.
        replicas: Ranks with the same weights; gradients are averaged over data and context.
        shards: Ranks over which ZeRO shards, including the ranks of `context`.
        shard_replicas: Ranks that hold the same ZeRO shards.
        can_average: True if the communication backend can average; otherwise gradients are summed,
            then divided.
        clock: Clock of this rank's waits in the collectives of a step.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        *,
        device_type: str = "cpu",
        new_group: Callable[[Sequence[int], str], ProcessGroup | None] | None = None,
        can_average: bool = True,
        clock: WaitClock | None = None,
    ) -> None:
        """Create the process groups of all axes.

        Args:
            layout: Size of each axis.
            rank: Global rank of this process.
            device_type: Device type of the tensors in collectives.
            new_group: Function that creates the process group of some ranks, of a name for messages
                and with the run's timeout; None if there is one process.
            can_average: True if the communication backend can average.
            clock: Clock of the waits in collectives; None for one that measures on the host.
        """
        self.clock = clock or WaitClock()
        self.layout, self.rank, self.device_type = layout, rank, device_type
        self.can_average = can_average
        self._new_group = new_group
        shards = layout.data // layout.replicas
        self._shape = (layout.pipeline, layout.replicas, shards, layout.context, layout.tensor)
        self._grid = np.arange(layout.world_size).reshape(self._shape)
        sharded = layout.zero_stage > 0
        self.tensor = self._axis("tensor", _TENSOR)
        self.context = self._axis("context", _CONTEXT)
        self.pipeline = self._axis(PIPELINE, _PIPELINE)
        self.replicas = self._axis("data", _REPLICA, _SHARD, _CONTEXT)
        self.shards = self._axis("shards", _SHARD, _CONTEXT) if sharded else self._single
        self.shard_replicas = self._axis("shard replicas", _REPLICA) if sharded else self._single

    @classmethod
    def of(cls, layout: ParallelLayout, runtime: Runtime) -> ParallelMesh:
        """Return the mesh of a run.

        Args:
            layout: Size of each axis.
            runtime: Rank, device and communication backend.
        """
        processes = runtime.processes
        return cls(
            layout,
            runtime.rank.rank,
            device_type=runtime.device.type,
            new_group=processes.new_group if processes else None,
            can_average=processes.backend.supports_average if processes else True,
            clock=WaitClock.of(runtime.device) if processes else None,
        )

    @property
    def data_rank(self) -> int:
        """Index of this rank's slice of the samples, from 0 to `layout.data` - 1."""
        coordinates = self.coordinates
        return coordinates[_REPLICA] * self._shape[_SHARD] + coordinates[_SHARD]

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Index of this rank on each axis of the layout, from the slowest to the fastest."""
        return tuple(int(index) for index in np.unravel_index(self.rank, self._shape))

    def shard_mesh(self) -> DeviceMesh:
        """Return torch's mesh for `fully_shard`: replicas of shards, then shards."""
        from torch.distributed.device_mesh import DeviceMesh

        shards, replicas = self.shards, self.shard_replicas
        assert shards.group is not None, "ZeRO needs several ranks"
        if replicas.group is None:
            return DeviceMesh.from_group(shards.group, self.device_type, mesh_dim_names=("shard",))
        ranks = np.asarray(self.replicas.ranks).reshape(replicas.size, shards.size)
        return DeviceMesh.from_group(
            [replicas.group, shards.group],
            self.device_type,
            mesh=ranks.tolist(),
            mesh_dim_names=("replica", "shard"),
        )

    def pipeline_holders(self, holders: Sequence[int]) -> Axis:
        """Return the axis of some ranks of each pipeline; all ranks must call it.

        Args:
            holders: Their indices on the pipeline axis.

        Returns:
            The axis; of size 1 on every other rank.
        """
        return self._axis_of("holders of a weight", self._rows((_PIPELINE,))[:, list(holders)])

    def replica_groups(self, *, tensor: bool, holders: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """Return the ranks that hold the same part of a parameter, [groups, replicas].

        Args:
            tensor: True for parameters that are replicated over the tensor axis.
            holders: Ranks of the pipeline axis that share the parameters; empty: each is on one.
        """
        dims = [_REPLICA] if self.layout.zero_stage else [_REPLICA, _SHARD, _CONTEXT]
        dims += [_TENSOR] if tensor else []
        if not holders:
            return self._rows(tuple(dims))
        return self._rows((_PIPELINE, *dims), self._grid[list(holders)])

    def stage_ranks(self) -> list[list[int]]:
        """Return the ranks of each pipeline stage."""
        found: list[list[int]] = self._grid.reshape(self.layout.pipeline, -1).tolist()
        return found

    @property
    def _single(self) -> Axis:
        return Axis(0, 1, (self.rank,), None, self.clock)

    def _rows(
        self, dims: tuple[int, ...], grid: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the ranks of each group of the axis that joins *dims*, [groups, size].

        Args:
            dims: Axes of the layout.
            grid: Ranks by their index on each axis; None for all ranks.
        """
        grid = self._grid if grid is None else grid
        others = [dim for dim in range(grid.ndim) if dim not in dims]
        size = int(np.prod([grid.shape[dim] for dim in dims]))
        return grid.transpose(*others, *dims).reshape(-1, size)

    def _axis(self, name: str, *dims: int) -> Axis:
        return self._axis_of(name, self._rows(dims))

    def _axis_of(self, name: str, rows: npt.NDArray[np.int64]) -> Axis:
        axis = self._single
        if rows.shape[1] == 1:
            return axis
        assert self._new_group is not None, "several ranks need a process group"
        for row in rows:  # all ranks create all groups, in the same order
            ranks = tuple(int(rank) for rank in row)
            group = self._new_group(ranks, name)
            if self.rank in ranks:
                axis = Axis(ranks.index(self.rank), len(ranks), ranks, group, self.clock)
        return axis
