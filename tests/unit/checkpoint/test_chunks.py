"""Boxes: what two share, and whether some make a whole."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.checkpoint.chunks import Box, overlap, tile


def cut(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    """Cut a whole at random."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw.randrange(12)):
        box = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        at = draw.randrange(box.size[dim] + 1)
        low, high = list(box.size), list(box.size)
        low[dim], high[dim] = at, box.size[dim] - at
        offset = list(box.offset)
        offset[dim] += at
        parts = [Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))]
        boxes += [part for part in parts if all(part.size)] or [box]
    return boxes


def marked(boxes: list[Box], shape: tuple[int, ...]) -> np.ndarray:
    """Count how many boxes have each element."""
    found = np.zeros(shape, dtype=int)
    for box in boxes:
        found[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))] += 1
    return found


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_parts_of_a_whole(sizes: list[int], draw: random.Random) -> None:
    """Cut in any way they make the whole; one moved, lost or doubled is noticed."""
    shape = tuple(sizes)
    boxes = cut(shape, draw)
    assert tile(boxes, shape)
    assert not tile([*boxes, draw.choice(boxes)], shape)
    assert not tile(boxes[1:], shape)
    place = draw.randrange(len(boxes))
    moved = tuple(draw.randrange(n) for n in shape)
    other = [*boxes[:place], Box(moved, boxes[place].size), *boxes[place + 1 :]]
    inside = all(a + n <= m for a, n, m in zip(moved, boxes[place].size, shape, strict=True))
    assert tile(other, shape) == (inside and bool((marked(other, shape) == 1).all()))


@given(st.randoms(use_true_random=False))
def test_what_two_share(draw: random.Random) -> None:
    """The common elements, or nothing."""
    shape = (7, 5)
    one, other = (
        Box(
            tuple(offset),
            tuple(draw.randint(1, n - at) for at, n in zip(offset, shape, strict=True)),
        )
        for offset in ([draw.randrange(n) for n in shape] for _ in range(2))
    )
    shared = overlap(one, other)
    both = (marked([one], shape) & marked([other], shape)).astype(bool)
    assert (marked([shared] if shared else [], shape).astype(bool) == both).all()


def test_odd_shapes() -> None:
    """A number is one box without dims, which any other is; an empty tensor has an empty one."""
    number = Box((), ())
    assert tile([number], ())
    assert not tile([number, number], ())
    assert overlap(number, number) == number
    assert tile([Box((0, 0), (0, 4))], (0, 4))
    assert not tile([], (0, 4))
    assert overlap(Box((0, 0), (0, 4)), Box((0, 0), (0, 4))) is None


@pytest.mark.parametrize("box", [Box((0,), (5,)), Box((2, 0), (3, 4)), Box((0, 0), (4, 4, 1))])
def test_outside(box: Box) -> None:
    """A box of other dims or beyond the end is none of it."""
    assert not tile([box], (4, 4))


def test_very_many_parts() -> None:
    """Those of a large run are compared in no time; more than any has are refused."""
    boxes = [Box((row, 0), (1, 8)) for row in range(5000)]
    began = time.process_time()
    assert tile(boxes, (5000, 8))
    assert time.process_time() - began < 10
    assert not tile([Box((row,), (1,)) for row in range(2**16 + 1)], (2**16 + 1,))
