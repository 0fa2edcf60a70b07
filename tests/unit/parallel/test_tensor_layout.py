"""Tensor layouts: the results of `torch.chunk`, and rows of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmcore.parallel.tensor_layout import TensorLayout, box

Division = tuple[tuple[int, ...], int, int, tuple[int, ...]]


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    """Draw the shape of a part, the split dim, the number of parts, and groups."""
    groups, size = draw(st.lists(st.integers(1, 4), max_size=3)), draw(st.integers(1, 4))
    local = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(local) - 1))
    local[dim] = sum(groups) or local[dim]
    return tuple(local), dim, size, tuple(groups)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


def part_of(whole: Tensor, dim: int, rank: int, size: int, groups: tuple[int, ...]) -> Tensor:
    """Return the result of `torch.chunk` of a rank for each group."""
    wholes = [size * one for one in groups] or [whole.shape[dim]]
    chunks = [group.chunk(size, dim=dim)[rank] for group in whole.split(wholes, dim=dim)]
    return torch.cat(chunks, dim=dim)


@given(divisions())
def test_divided_is_chunked(division: Division) -> None:
    """Each rank's part is its chunk of every group, and its pieces fill it once."""
    local, dim, size, groups = division
    for rank in range(size):
        layout = TensorLayout.split(local, dim, rank=rank, size=size, groups=groups)
        assert math.prod(layout.shape) == size * math.prod(local)
        whole, part = numbered(layout.shape), torch.full(local, -1.0, dtype=torch.float64)
        layout.fill(part, whole)
        assert torch.equal(part, part_of(whole, dim, rank, size, groups))
        assert sum(math.prod(piece.size) for piece in layout.chunks) == math.prod(local)


@given(divisions(), st.integers(1, 5))
def test_rows_are_shards(division: Division, shards: int) -> None:
    """Rows of a part, as ZeRO shards it, are the chunk of the chunk; the last may be smaller."""
    local, dim, size, groups = division
    each = -(-local[0] // shards)
    rank = size - 1
    layout = TensorLayout.split(local, dim, rank=rank, size=size, groups=groups)
    part = part_of(numbered(layout.shape), dim, rank, size, groups)
    chunks = part.chunk(shards, dim=0)
    for shard in range(shards):
        rows = layout.rows(shard * each, each)
        assert rows.shape == layout.shape
        if shard >= len(chunks):
            assert not rows.chunks
            continue
        own = torch.full_like(chunks[shard], -1.0)
        rows.fill(own, numbered(layout.shape))
        assert torch.equal(own, chunks[shard])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_whole(shape: tuple[int, ...]) -> None:
    """A tensor that is not split is one chunk."""
    layout = TensorLayout.whole(shape)
    found = torch.zeros(shape, dtype=torch.float64)
    layout.fill(found, numbered(shape))
    assert torch.equal(found, numbered(shape))
    assert len(layout.chunks) == 1


def test_packed_parts_by_hand() -> None:
    """Of queries, keys and values, four rows each, the second process has the last two."""
    layout = TensorLayout.split((6, 5), 0, rank=1, size=2, groups=(2, 2, 2))
    assert layout.shape == (12, 5)
    assert [(one.start, one.offset, one.size) for one in layout.chunks] == [
        ((0, 0), (2, 0), (2, 5)),
        ((2, 0), (6, 0), (2, 5)),
        ((4, 0), (10, 0), (2, 5)),
    ]


def test_unequal_groups_by_hand() -> None:
    """Of eight rows of queries and two each of keys and values the second has the last of each."""
    layout = TensorLayout.split((6,), 0, rank=1, size=2, groups=(4, 1, 1))
    assert layout.shape == (12,)
    assert [(one.start, one.offset, one.size) for one in layout.chunks] == [
        ((0,), (4,), (4,)),
        ((4,), (9,), (1,)),
        ((5,), (11,), (1,)),
    ]


def test_box_is_a_view() -> None:
    """A box is a view: writes to it change the tensor."""
    tensor = torch.zeros(3, 4)
    box(tensor, (1, 2), (2, 2)).fill_(1.0)
    assert tensor.sum() == 4
    assert bool((tensor[1:, 2:] == 1).all())
