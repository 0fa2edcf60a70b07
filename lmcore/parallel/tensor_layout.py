"""`TensorLayout`: position of a rank's local tensor in the whole tensor.

Local tensors are plain tensors with a layout beside them.  Initial weights, checkpoints and
gradient norms are its only users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Piece", "TensorLayout"]

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
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
        pieces: Chunks, without empty ones.
    """

    shape: Numbers
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, shape: Numbers) -> TensorLayout:
        """Return the layout of a tensor that is not split."""
        zeros = (0,) * len(shape)
        return cls(shape, (Piece(zeros, zeros, shape),))

    @classmethod
    def divided(
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

        pieces, first = [], 0
        for part in groups:
            box = tuple(part if i == dim else n for i, n in enumerate(local))
            pieces.append(Piece(at(first), at(first * size + rank * part), box))
            first += part
        return cls(shape, tuple(pieces))

    def rows(self, first: int, count: int) -> TensorLayout:
        """Return the layout of a tensor of *count* local rows from *first* on."""
        found = []
        for piece in self.pieces:
            low = max(piece.start[0], first)
            high = min(piece.start[0] + piece.size[0], first + count)
            if low < high:
                found.append(
                    Piece(
                        (low - first, *piece.start[1:]),
                        (piece.offset[0] + low - piece.start[0], *piece.offset[1:]),
                        (high - low, *piece.size[1:]),
                    )
                )
        return TensorLayout(self.shape, tuple(found))

    def fill(self, local: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of *whole* into *local*."""
        with torch.no_grad():
            for piece in self.pieces:
                box(local, piece.start, piece.size).copy_(box(whole, piece.offset, piece.size))


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
