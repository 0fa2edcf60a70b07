"""`Box`: a part of a whole tensor, and whether parts make the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Box", "inside", "overlap", "tile"]

Numbers = tuple[int, ...]

_MOST = 2**16
"""More parts of one tensor than any run has; comparing them all would take long."""


@dataclass(frozen=True, order=True)
class Box:
    """A box of elements: the first one by dim, and how many there are."""

    offset: Numbers
    size: Numbers


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes of a tensor share; None where that is nothing."""
    first = tuple(max(a, b) for a, b in zip(one.offset, other.offset, strict=True))
    ends = (
        min(a + m, b + n)
        for a, m, b, n in zip(one.offset, one.size, other.offset, other.size, strict=True)
    )
    size = tuple(end - start for start, end in zip(first, ends, strict=True))
    return Box(first, size) if all(length > 0 for length in size) else None


def inside(box: Box, shape: Numbers) -> bool:
    """Return whether *box* is one of a tensor of *shape*."""
    return len(box.offset) == len(box.size) == len(shape) and all(
        offset + size <= whole
        for offset, size, whole in zip(box.offset, box.size, shape, strict=True)
    )


def tile(boxes: Sequence[Box], shape: Numbers) -> bool:
    """Return whether *boxes* have every element of a tensor of *shape*, each once."""
    if not boxes or len(boxes) > _MOST or not all(inside(box, shape) for box in boxes):
        return False
    if sum(math.prod(box.size) for box in boxes) != math.prod(shape):
        return False
    filled = [box for box in boxes if math.prod(box.size)]
    if len(filled) < 2:
        return True
    lows = np.asarray([box.offset for box in filled])
    highs = lows + np.asarray([box.size for box in filled])
    # As many elements as the whole has, none of them twice.
    return all(
        int(((lows < high) & (highs > low)).all(axis=1).sum()) == 1
        for low, high in zip(lows, highs, strict=True)
    )
