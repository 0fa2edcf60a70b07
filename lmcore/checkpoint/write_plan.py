"""Checkpoint write plan: assigns each chunk to exactly one rank that holds it.

A rank may hold parts of tensors, and several ranks may hold replicas of the same part.  Chunks are
rectangular parts of whole tensors, none much larger than `_LARGEST_BYTES`, so that many ranks and
threads write at the same time, and a rank that loads a part of a tensor reads little else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcore.checkpoint.chunks import ChunkBounds, is_partition
from lmcore.checkpoint.manifest import TensorEntry
from lmcore.contract.dtype import dtype_name
from lmcore.runtime.process.channel import Channel

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.parallel.tensor_layout import Chunk, TensorLayout
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = ["WritePlan", "WritePlanner", "num_bytes"]

_LARGEST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class WritePlan:
    """Chunks that this rank writes, and on rank 0 the chunks of all ranks.

    Attributes:
        own: Tensor name and chunk of the local tensor, by a unique key.
        tensors: Dtype and shape of all tensors of the checkpoint; on rank 0 only.
        chunks: Tensor name and bounds of each rank's chunks, in the order of its `own`; on rank 0
            only.
    """

    own: Mapping[str, tuple[str, Chunk]]
    tensors: Mapping[str, TensorEntry]
    chunks: Sequence[Sequence[tuple[str, ChunkBounds]]]

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of this rank's chunks by key, from its local tensors."""
        from lmcore.parallel.tensor_layout import box

        return {
            key: box(tensors[name].detach(), chunk.start, chunk.size)
            for key, (name, chunk) in self.own.items()
        }


class WritePlanner:
    """Connection of the ranks that write checkpoints together, and their write plan.

    Attributes:
        saves: Channel of saves, which may be in a thread.
        loads: Channel of loads.
    """

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        """Open the channels; all ranks must call it, in the same order.

        Args:
            rendezvous: Connection of the processes; None if this is the only process.
        """
        self.saves, self.loads = Channel(rendezvous), Channel(rendezvous)
        self._plans = Channel(rendezvous)
        self._last: tuple[dict[str, Any], WritePlan] | None = None

    def plan(
        self,
        tensors: Mapping[str, Tensor],
        layouts: Mapping[str, TensorLayout],
        unequal: Collection[str] = (),
    ) -> WritePlan:
        """Return the write plan of this rank; all ranks must call it.

        The last plan is returned, without an exchange, if the rank holds the same tensors as
        before: names and layouts must change on all ranks at the same time.

        Args:
            tensors: Local tensors by name; plain tensors with values.
            layouts: Layouts of the local tensors by name; a tensor without one is whole.
            unequal: Names of tensors with other values on each rank: the first rank that holds one
                writes all of it.

        Raises:
            ValueError: The local tensors of all ranks do not make whole tensors (a bug).
        """
        cuts: dict[str, list[Chunk]] = {}
        held: dict[str, Any] = {}
        for name, tensor in tensors.items():
            layout = _layout(name, tensor, layouts)
            cut = [part for one in layout.chunks for part in _cut(one, tensor.element_size())]
            bounds = [[list(chunk.offset), list(chunk.size)] for chunk in cut]
            dtype = dtype_name(tensor.dtype)
            cuts[name], held[name] = cut, [dtype, list(layout.shape), bounds, name in unequal]
        if self._last is not None and self._last[0] == held:
            return self._last[1]
        assignment = _Assignment()
        assigned = self._plans.exchange(
            lambda: held, assignment.assign, "the write plan of a checkpoint"
        )
        own = {}
        for name, index in assigned:
            key = name if len(cuts[name]) == 1 else f"{name}#{index}"
            own[key] = (name, cuts[name][index])
        plan = WritePlan(own, assignment.tensors, assignment.chunks)
        self._last = (held, plan)
        return plan

    def forget(self) -> None:
        """Drop the last plan, so that the ranks make a new one; all ranks must call it."""
        self._last = None


class _AssignedChunk(NamedTuple):
    """A chunk that a rank writes.

    Attributes:
        name: Name of its tensor.
        bounds: Bounds in the whole tensor.
        local_index: Index among the chunks of the tensor that the rank holds.
    """

    name: str
    bounds: ChunkBounds
    local_index: int


class _Assignment:
    """Assignment of chunks to the ranks that hold them; used on rank 0.

    Attributes:
        tensors: Dtype and shape of all tensors, sorted by name; filled by `assign`.
        chunks: Tensor name and bounds of the chunks that each rank writes; filled by `assign`.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        self.chunks: list[list[tuple[str, ChunkBounds]]] = []

    def assign(self, held: list[dict[str, Any]]) -> list[list[tuple[str, int]]]:
        """Return the chunks that each rank writes, and fill `tensors` and `chunks`.

        Args:
            held: For the tensors of each rank, by name: dtype, shape, chunks, and True if only the
                first rank that holds the tensor may write it.

        Returns:
            For each rank and chunk, the tensor's name and the index of the chunk in that rank's
            tensor.

        Raises:
            ValueError: The ranks' tensors do not make whole tensors.
        """
        replicas: dict[tuple[str, ChunkBounds], list[tuple[int, int]]] = {}
        for rank, held_tensors in enumerate(held):
            for name, (dtype, shape, chunks, is_unequal) in held_tensors.items():
                entry = TensorEntry(dtype, tuple(shape))
                if self.tensors.setdefault(name, entry) != entry:
                    raise ValueError(f"`{name}` differs between processes: {entry}")
                for index, (offset, size) in enumerate(chunks):
                    key = (name, ChunkBounds(tuple(offset), tuple(size)))
                    holders = replicas.setdefault(key, [])
                    if not (holders and is_unequal):
                        holders.append((rank, index))
        self.tensors = dict(sorted(self.tensors.items()))
        self._check(replicas)
        assigned = self._balance(replicas, len(held))
        self.chunks = [[(chunk.name, chunk.bounds) for chunk in own] for own in assigned]
        return [[(chunk.name, chunk.local_index) for chunk in own] for own in assigned]

    def _check(self, replicas: Mapping[tuple[str, ChunkBounds], Any]) -> None:
        chunks: dict[str, list[ChunkBounds]] = {name: [] for name in self.tensors}
        for name, chunk in replicas:
            chunks[name].append(chunk)
        for name, entry in self.tensors.items():
            if not is_partition(chunks[name], entry.shape):
                raise ValueError(f"the processes' parts of `{name}` do not make a whole tensor")

    def _balance(
        self, replicas: Mapping[tuple[str, ChunkBounds], list[tuple[int, int]]], world_size: int
    ) -> list[list[_AssignedChunk]]:
        """Assign each chunk to the rank with the fewest bytes that holds it, large chunks first."""
        loads = [0] * world_size
        assigned: list[list[_AssignedChunk]] = [[] for _ in range(world_size)]
        sized = [
            (num_bytes(TensorEntry(self.tensors[name].dtype, chunk.size)), (name, chunk))
            for name, chunk in replicas
        ]
        for size, key in sorted(sized, key=lambda one: -one[0]):
            rank, index = min(replicas[key], key=lambda one: loads[one[0]])
            loads[rank] += size
            assigned[rank].append(_AssignedChunk(*key, index))
        return [sorted(own) for own in assigned]


def _layout(name: str, tensor: Tensor, layouts: Mapping[str, TensorLayout]) -> TensorLayout:
    from lmcore.parallel.tensor_layout import TensorLayout

    return layouts.get(name) or TensorLayout.whole(tuple(tensor.shape))


def _cut(chunk: Chunk, item_size: int) -> list[Chunk]:
    """Cut a large chunk along its first dim."""
    size = math.prod(chunk.size) * item_size
    if size <= _LARGEST_BYTES or not chunk.size:
        return [chunk]
    length, rest = chunk.size[0], chunk.size[1:]
    rows = max(1, _LARGEST_BYTES * length // size)
    return [
        replace(
            chunk,
            start=(chunk.start[0] + first, *chunk.start[1:]),
            offset=(chunk.offset[0] + first, *chunk.offset[1:]),
            size=(min(rows, length - first), *rest),
        )
        for first in range(0, length, rows)
    ]


def num_bytes(entry: TensorEntry) -> int:
    """Return the bytes of a tensor."""
    import torch

    size: int = getattr(torch, entry.dtype).itemsize
    return math.prod(entry.shape) * size
