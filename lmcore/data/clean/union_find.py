"""Which document stands for each group of duplicates: a union-find over positions, on the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.files import disk_errors

__all__ = ["UnionFind"]

_CHUNK = 1 << 20


class UnionFind:
    """Groups of positions; the leader of a group is its first position.

    Args:
        path: Where the positions go if they are more than a million.
        count: Positions, each a group of its own at first.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._parents: npt.NDArray[np.int64]
        if count <= _CHUNK:
            self._parents = np.arange(count, dtype=np.int64)
            return
        with disk_errors(path):
            self._parents = np.memmap(path, np.int64, "w+", shape=(count,))
            for start in range(0, count, _CHUNK):
                end = min(start + _CHUNK, count)
                self._parents[start:end] = np.arange(start, end)

    def find(self, position: int) -> int:
        """Return the leader of the group that *position* is in."""
        parents = self._parents
        while (parent := int(parents[position])) != position:
            parents[position] = parents[parent]
            position = int(parents[position])
        return position

    def union(self, first: int, second: int) -> None:
        """Make one group of those that two positions are in."""
        low, high = sorted((self.find(first), self.find(second)))
        self._parents[high] = low

    def union_rows(self, positions: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
        """Make a group of each run of *positions*, none of which is in a group yet."""
        sizes = np.diff(starts, append=len(positions))
        self._parents[positions] = np.repeat(positions[starts], sizes)

    def representatives(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the clusters of the positions from *start* to before *end*."""
        clusters = np.array(self._parents[start:end])
        while True:
            above = self._parents[clusters]
            if np.array_equal(above, clusters):
                return clusters
            clusters = above
