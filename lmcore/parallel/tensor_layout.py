"""`TensorLayout`: which part of a whole tensor the tensor of one process is.

Divided tensors are plain tensors; their layouts stand beside them.  Initial weights, checkpoints
and gradient norms are all that need to know the whole.
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
    """A box of the local tensor that is a box of the whole one.

    Attributes:
        start: First element in the local tensor, by dim.
        offset: First element in the whole tensor.
        size: Elements.
    """

    start: Numbers
    offset: Numbers
    size: Numbers


@dataclass(frozen=True)
class TensorLayout:
    """The pieces that the local tensor consists of; together they are all of it.

    Attributes:
        shape: Of the whole tensor.
        pieces: Without those that are empty.
    """

    shape: Numbers
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, shape: Numbers) -> TensorLayout:
        """Return the layout of a tensor that is not divided."""
        zeros = (0,) * len(shape)
        return cls(shape, (Piece(zeros, zeros, shape),))

    @classmethod
    def divided(
        cls, local: Numbers, dim: int, *, rank: int, size: int, groups: Sequence[int] = ()
    ) -> TensorLayout:
        """Return the layout of one of *size* equal parts of a dim.

        Args:
            local: Shape of the part.
            dim: The dim that is divided.
            rank: Which part.
            size: How many there are.
            groups: Sizes, in the part, of groups that the whole dim consists of and each of which
                is divided: three where queries, keys and values lie one after the other; none:
                all is one.
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
        """Return the layout of the local rows *first* to *first* + *count*, a tensor of its own."""
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
        """Copy this part of *whole* into *local*."""
        with torch.no_grad():
            for piece in self.pieces:
                box(local, piece.start, piece.size).copy_(box(whole, piece.offset, piece.size))


def box(tensor: Tensor, start: Numbers, size: Numbers) -> Tensor:
    """Return the view of a box of *tensor*."""
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor
