"""Equal keys in any number of rows, and the groups that they make."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data.clean.key_store import KeyStore
from lmcore.data.clean.union_find import UnionFind


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("rows_held", [10, 100, 10_000])
def test_groups(tmp_path: Path, columns: int, rows_held: int) -> None:
    """All positions of a key come together and in order, in memory or in files."""
    numbers = np.random.default_rng(columns)
    values = numbers.integers(0, 1 << 64, size=300, dtype=np.uint64)
    keys = values[numbers.integers(0, 300, size=(1000, columns))]
    if columns == 2:
        keys[:, 0] = values[:30][numbers.integers(0, 30, size=1000)]  # alike in the first only
        keys[:, 1] &= np.uint64(7)
    positions = np.arange(1000)
    store = KeyStore(tmp_path, columns, rows_held=rows_held)
    for start in range(0, 1000, 37):
        store.add(keys[start : start + 37], positions[start : start + 37])
    assert any(tmp_path.iterdir()) == (rows_held < 1000)
    expected: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
        expected[tuple(key)].append(position)
    found = []
    for where, starts in store.buckets():
        for start, end in zip(starts, [*starts[1:], len(where)], strict=True):
            found.append(where[start:end].tolist())
    assert found == [expected[key] for key in sorted(expected) if len(expected[key]) > 1]
    assert not any(tmp_path.iterdir())


def test_no_rows(tmp_path: Path) -> None:
    """Without rows there are no groups."""
    assert list(KeyStore(tmp_path, 1).buckets()) == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_leaders(pairs: list[tuple[int, int]]) -> None:
    """The leader of a position is the first one that it is connected with, over any others."""
    clusters = UnionFind(Path("unused"), 31)
    neighbours: dict[int, set[int]] = {at: {at} for at in range(31)}
    for first, second in pairs:
        clusters.union(first, second)
        neighbours[first].add(second)
        neighbours[second].add(first)
    expected = []
    for at in range(31):
        reached, open_ = {at}, [at]
        while open_:
            new = neighbours[open_.pop()] - reached
            reached |= new
            open_.extend(new)
        expected.append(min(reached))
    assert [clusters.find(at) for at in range(31)] == expected
    assert clusters.representatives(0, 31).tolist() == expected
    assert clusters.representatives(10, 20).tolist() == expected[10:20]


def test_leaders_on_the_disk(tmp_path: Path) -> None:
    """Many positions are kept in a file."""
    count = (1 << 20) + 5
    clusters = UnionFind(tmp_path / "clusters", count)
    clusters.union(count - 1, 3)
    clusters.union_rows(np.array([10, 20, 30, 11, 21]), np.array([0, 3]))
    assert (tmp_path / "clusters").stat().st_size == 8 * count
    assert clusters.representatives(count - 2, count).tolist() == [count - 2, 3]
    assert clusters.representatives(10, 31)[[0, 1, 10, 11, 20]].tolist() == [10, 11, 10, 11, 10]
