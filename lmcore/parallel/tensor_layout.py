"""`TensorLayout`: position of a rank's local tensor in the whole tensor.

Local tensors are plain tensors with a layout beside them.  Initial weights, checkpoints and
gradient norms are its only users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Chunk", "TensorLayout", "local_part"]

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """Chunk: a box of the local tensor that is a box of the whole tensor.

    Attributes:
        start: Index of the first element in the local tensor, by dim.
        offset: Index of the first element in the whole tensor, by dim.
        size: Number of elements, by dim.
    """

    start: Numbers
    offset: Numbers
    size: Numbers


@dataclass(frozen=True)
class TensorLayout:
    """Chunks that make up a local tensor.

    Attributes:
        shape: Shape of the whole tensor.
        chunks: Chunks, without empty ones.
    """

    shape: Numbers
    chunks: tuple[Chunk, ...]

    @classmethod
    def whole(cls, shape: Numbers) -> TensorLayout:
        """Return the layout of a tensor that is not split."""
        zeros = (0,) * len(shape)
        return cls(shape, (Chunk(zeros, zeros, shape),))

    @classmethod
    def split(
        cls, local: Numbers, dim: int, *, rank: int, size: int, groups: Sequence[int] = ()
    ) -> TensorLayout:
        """Return the layout of one of *size* equal parts of a dim.

        Args:
            local: Shape of the part.
            dim: Dim that is split.
            rank: Index of the part.
            size: Number of parts.
            groups: Sizes, in the part, of packed groups that are split one by one, such as queries,
                keys and values; empty: the dim is split as a whole.
        """
        groups = groups or (local[dim],)
        assert sum(groups) == local[dim]
        shape = tuple(n * size if i == dim else n for i, n in enumerate(local))

        def at(number: int) -> Numbers:
            return tuple(number if i == dim else 0 for i in range(len(local)))

        chunks, first = [], 0
        for part in groups:
            box = tuple(part if i == dim else n for i, n in enumerate(local))
            chunks.append(Chunk(at(first), at(first * size + rank * part), box))
            first += part
        return cls(shape, tuple(chunks))

    def rows(self, first: int, count: int) -> TensorLayout:
        """Return the layout of a tensor of *count* local rows from *first* on."""
        chunks = []
        for chunk in self.chunks:
            low = max(chunk.start[0], first)
            high = min(chunk.start[0] + chunk.size[0], first + count)
            if low < high:
                chunks.append(
                    Chunk(
                        (low - first, *chunk.start[1:]),
                        (chunk.offset[0] + low - chunk.start[0], *chunk.offset[1:]),
                        (high - low, *chunk.size[1:]),
                    )
                )
        return TensorLayout(self.shape, tuple(chunks))

    def shard(self, rows: int, rank: int, size: int) -> TensorLayout:
        """Return the layout of a rank's shard of *rows* local rows, as `fully_shard` divides them.

        Args:
            rows: Number of local rows before the division.
            rank: Index of the rank among the ranks of the shards.
            size: Number of shards.
        """
        each = -(-rows // size)
        return self.rows(rank * each, each)

    def fill(self, local: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of *whole* into *local*."""
        with torch.no_grad():
            for chunk in self.chunks:
                box(local, chunk.start, chunk.size).copy_(box(whole, chunk.offset, chunk.size))


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; another tensor itself."""
    to_local = getattr(tensor, "to_local", None)  # without importing torch's class, 0.3 s
    return tensor if to_local is None else to_local()


def box(tensor: Tensor, start: Numbers, size: Numbers) -> Tensor:
    """Return a view of a box of *tensor*.

    Args:
        tensor: Tensor to view.
        start: Index of the first element, by dim.
        size: Number of elements, by dim.
    """
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor
