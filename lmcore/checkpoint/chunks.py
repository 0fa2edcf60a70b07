"""Bounds of chunks: a checkpoint stores each tensor as chunks that partition it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["ChunkBounds", "is_inside", "is_partition", "overlap"]

Numbers = tuple[int, ...]

_MOST = 2**16
"""Largest number of chunks of a tensor; no run has more, and comparing them all takes long."""


@dataclass(frozen=True, order=True)
class ChunkBounds:
    """Box of a tensor's elements that a chunk has.

    Attributes:
        offset: Index of the first element, by dim.
        size: Number of elements, by dim.
    """

    offset: Numbers
    size: Numbers


def overlap(first: ChunkBounds, second: ChunkBounds) -> ChunkBounds | None:
    """Return the elements that two chunks of a tensor share; None if there are none."""
    start = tuple(max(a, b) for a, b in zip(first.offset, second.offset, strict=True))
    ends = (
        min(a + m, b + n)
        for a, m, b, n in zip(first.offset, first.size, second.offset, second.size, strict=True)
    )
    size = tuple(end - low for low, end in zip(start, ends, strict=True))
    return ChunkBounds(start, size) if all(length > 0 for length in size) else None


def is_inside(chunk: ChunkBounds, shape: Numbers) -> bool:
    """Return True if *chunk* is a chunk of a tensor of *shape*."""
    return len(chunk.offset) == len(chunk.size) == len(shape) and all(
        offset + size <= whole
        for offset, size, whole in zip(chunk.offset, chunk.size, shape, strict=True)
    )


def is_partition(chunks: Sequence[ChunkBounds], shape: Numbers) -> bool:
    """Return True if *chunks* have every element of a tensor of *shape* exactly once."""
    if not chunks or len(chunks) > _MOST or not all(is_inside(one, shape) for one in chunks):
        return False
    if sum(math.prod(chunk.size) for chunk in chunks) != math.prod(shape):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.size)]
    if len(filled) < 2:
        return True
    lows = np.asarray([chunk.offset for chunk in filled])
    highs = lows + np.asarray([chunk.size for chunk in filled])
    # As many elements as the whole has, and no two chunks overlap.
    return all(
        int(((lows < high) & (highs > low)).all(axis=1).sum()) == 1
        for low, high in zip(lows, highs, strict=True)
    )
