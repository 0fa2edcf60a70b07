"""`ParallelMesh`: this process's place on each axis of a run, and who else is on it.

Processes are numbered as `ParallelLayout` says.  An axis may join several of the layout's: those
that hold copies of the same weights, say, differ in data and context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from lmcore.config.layout import ParallelLayout
    from lmcore.runtime.runtime import Runtime

__all__ = ["Axis", "ParallelMesh"]

_PIPELINE, _REPLICA, _SHARD, _CONTEXT, _TENSOR = range(5)


@dataclass(frozen=True)
class Axis:
    """One axis as this process sees it.

    Attributes:
        rank: This process's place on it.
        size: Processes on it.
        ranks: Their ranks in the run, in order.
        group: Their process group; None where this process is the only one.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None


class ParallelMesh:
    """The axes of a run; all processes must make it, as all make all groups.

    Attributes:
        layout: Sizes.
        rank: This process.
        tensor: Processes that divide every layer.
        context: Processes that divide every sequence.
        pipeline: Processes that divide the layers.
        copies: Processes with the same weights: gradients are summed over data and context.
        shards: Processes over which ZeRO shards; those of `context` take part.
        replicas: Processes that hold the same shards.
        pipeline_ends: Those of the first and the last stage of a pipeline; any other process, and
            one that has both, is alone.
        can_average: Whether an exchange may average; otherwise it sums, and is divided.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        *,
        device_type: str = "cpu",
        new_group: Callable[[Sequence[int]], ProcessGroup | None] | None = None,
        can_average: bool = True,
    ) -> None:
        """Lay the processes out.

        Args:
            layout: Sizes of the axes.
            rank: This process.
            device_type: Device type of the tensors that are exchanged.
            new_group: Makes the group of some ranks, with the run's timeout; None where there is
                one process.
            can_average: Whether the communication backend averages.
        """
        self.layout, self.rank, self.device_type = layout, rank, device_type
        self.can_average = can_average
        self._new_group = new_group
        shards = layout.data // layout.replicas
        self._shape = (layout.pipeline, layout.replicas, shards, layout.context, layout.tensor)
        self._grid = np.arange(layout.world_size).reshape(self._shape)
        sharded = layout.zero_stage > 0
        self.tensor = self._axis(_TENSOR)
        self.context = self._axis(_CONTEXT)
        self.pipeline = self._axis(_PIPELINE)
        self.copies = self._axis(_REPLICA, _SHARD, _CONTEXT)
        self.shards = self._axis(_SHARD, _CONTEXT) if sharded else self._alone
        self.replicas = self._axis(_REPLICA) if sharded else self._alone
        self.pipeline_ends = self._ends()

    @classmethod
    def of(cls, layout: ParallelLayout, runtime: Runtime) -> ParallelMesh:
        """Return the mesh of a run's processes."""
        processes = runtime.processes
        return cls(
            layout,
            runtime.rank.rank,
            device_type=runtime.device.type,
            new_group=processes.new_group if processes else None,
            can_average=processes.backend.supports_average if processes else True,
        )

    @property
    def data_rank(self) -> int:
        """Which slice of the samples is this process's."""
        place = self.place
        return place[_REPLICA] * self._shape[_SHARD] + place[_SHARD]

    @property
    def place(self) -> tuple[int, ...]:
        """Place on each axis of the layout, from slowest to fastest."""
        return tuple(int(one) for one in np.unravel_index(self.rank, self._shape))

    def shard_mesh(self) -> DeviceMesh:
        """Return torch's mesh of the processes over which ZeRO shards, replicas before shards."""
        from torch.distributed.device_mesh import DeviceMesh

        shards, replicas = self.shards, self.replicas
        assert shards.group is not None, "there is nobody to share with"
        if replicas.group is None:
            return DeviceMesh.from_group(shards.group, self.device_type, mesh_dim_names=("shard",))
        ranks = np.asarray(self.copies.ranks).reshape(replicas.size, shards.size)
        return DeviceMesh.from_group(
            [replicas.group, shards.group],
            self.device_type,
            mesh=ranks.tolist(),
            mesh_dim_names=("replica", "shard"),
        )

    @property
    def _alone(self) -> Axis:
        return Axis(0, 1, (self.rank,), None)

    def _ends(self) -> Axis:
        lines = self._lines((_PIPELINE,))
        if lines.shape[1] == 1 or self.layout.schedule == "zero-bubble-v":
            return self._alone
        return self._axis_of(np.stack([lines[:, 0], lines[:, -1]], axis=1))

    def _lines(self, dims: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Return [lines, processes on each] of the axis that joins *dims*."""
        others = [dim for dim in range(len(self._shape)) if dim not in dims]
        size = int(np.prod([self._shape[dim] for dim in dims]))
        return self._grid.transpose(*others, *dims).reshape(-1, size)

    def _axis(self, *dims: int) -> Axis:
        return self._axis_of(self._lines(dims))

    def _axis_of(self, lines: npt.NDArray[np.int64]) -> Axis:
        found = self._alone
        if lines.shape[1] == 1:
            return found
        assert self._new_group is not None, "several processes are connected"
        for line in lines:  # all processes make all groups, in one order
            ranks = tuple(int(rank) for rank in line)
            group = self._new_group(ranks)
            if self.rank in ranks:
                found = Axis(ranks.index(self.rank), len(ranks), ranks, group)
        return found
