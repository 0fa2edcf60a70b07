"""Boxes: what two share, and whether some make a whole."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.checkpoint.chunks import ChunkBounds, is_partition, overlap


def cut(shape: tuple[int, ...], draw: random.Random) -> list[ChunkBounds]:
    """Cut a whole at random."""
    chunks = [ChunkBounds((0,) * len(shape), shape)]
    for _ in range(draw.randrange(12)):
        chunk = chunks.pop(draw.randrange(len(chunks)))
        dim = draw.randrange(len(shape))
        at = draw.randrange(chunk.size[dim] + 1)
        low, high = list(chunk.size), list(chunk.size)
        low[dim], high[dim] = at, chunk.size[dim] - at
        offset = list(chunk.offset)
        offset[dim] += at
        parts = [ChunkBounds(chunk.offset, tuple(low)), ChunkBounds(tuple(offset), tuple(high))]
        chunks += [part for part in parts if all(part.size)] or [chunk]
    return chunks


def marked(chunks: list[ChunkBounds], shape: tuple[int, ...]) -> np.ndarray:
    """Count how many chunks have each element."""
    found = np.zeros(shape, dtype=int)
    for chunk in chunks:
        found[tuple(slice(a, a + n) for a, n in zip(chunk.offset, chunk.size, strict=True))] += 1
    return found


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_parts_of_a_whole(sizes: list[int], draw: random.Random) -> None:
    """Cut in any way they make the whole; one moved, lost or doubled is noticed."""
    shape = tuple(sizes)
    chunks = cut(shape, draw)
    assert is_partition(chunks, shape)
    assert not is_partition([*chunks, draw.choice(chunks)], shape)
    assert not is_partition(chunks[1:], shape)
    place = draw.randrange(len(chunks))
    moved = tuple(draw.randrange(n) for n in shape)
    other = [*chunks[:place], ChunkBounds(moved, chunks[place].size), *chunks[place + 1 :]]
    inside = all(a + n <= m for a, n, m in zip(moved, chunks[place].size, shape, strict=True))
    assert is_partition(other, shape) == (inside and bool((marked(other, shape) == 1).all()))


@given(st.randoms(use_true_random=False))
def test_what_two_share(draw: random.Random) -> None:
    """The common elements, or nothing."""
    shape = (7, 5)
    one, other = (
        ChunkBounds(
            tuple(offset),
            tuple(draw.randint(1, n - at) for at, n in zip(offset, shape, strict=True)),
        )
        for offset in ([draw.randrange(n) for n in shape] for _ in range(2))
    )
    shared = overlap(one, other)
    both = (marked([one], shape) & marked([other], shape)).astype(bool)
    assert (marked([shared] if shared else [], shape).astype(bool) == both).all()


def test_odd_shapes() -> None:
    """A number is one chunk without dims, which any other is; an empty tensor has an empty one."""
    number = ChunkBounds((), ())
    assert is_partition([number], ())
    assert not is_partition([number, number], ())
    assert overlap(number, number) == number
    assert is_partition([ChunkBounds((0, 0), (0, 4))], (0, 4))
    assert not is_partition([], (0, 4))
    assert overlap(ChunkBounds((0, 0), (0, 4)), ChunkBounds((0, 0), (0, 4))) is None


@pytest.mark.parametrize(
    "chunk", [ChunkBounds((0,), (5,)), ChunkBounds((2, 0), (3, 4)), ChunkBounds((0, 0), (4, 4, 1))]
)
def test_outside(chunk: ChunkBounds) -> None:
    """A chunk of other dims or beyond the end is none of it."""
    assert not is_partition([chunk], (4, 4))


def test_very_many_parts() -> None:
    """The parts of a large run are compared fast; more parts than any run has are refused."""
    chunks = [ChunkBounds((row, 0), (1, 8)) for row in range(5000)]
    began = time.process_time()
    assert is_partition(chunks, (5000, 8))
    assert time.process_time() - began < 10
    assert not is_partition([ChunkBounds((row,), (1,)) for row in range(2**16 + 1)], (2**16 + 1,))
