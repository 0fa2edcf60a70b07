"""Union-find over the positions of documents, on disk: clusters of duplicates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.files import disk_errors

__all__ = ["UnionFind"]

_CHUNK = 1 << 20


class UnionFind:
    """Clusters of positions; the representative of a cluster is its first position.

    Source: Tarjan 1975, with path halving.

    Args:
        path: file for the positions, if they are more than 2**20.
        count: number of positions, each a cluster at first.
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
        """Return the representative of the cluster of *position*."""
        parents = self._parents
        while (parent := int(parents[position])) != position:
            parents[position] = parents[parent]
            position = int(parents[position])
        return position

    def union(self, first: int, second: int) -> None:
        """Merge the clusters of two positions."""
        low, high = sorted((self.find(first), self.find(second)))
        self._parents[high] = low

    def union_rows(self, positions: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
        """Form a cluster of each run of *positions*, none of them clustered yet.

        Args:
            positions: (positions,), runs one after another, each in ascending order.
            starts: (runs,), index of the first position of each run.
        """
        sizes = np.diff(starts, append=len(positions))
        self._parents[positions] = np.repeat(positions[starts], sizes)

    def representatives(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the representatives of the positions *start* to *end* - 1."""
        found = np.array(self._parents[start:end])
        while True:
            parents = self._parents[found]
            if np.array_equal(parents, found):
                return found
            found = parents
