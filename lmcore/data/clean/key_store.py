"""Equal keys among more rows than fit in memory: partition by key, sort each partition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.files import disk_errors

__all__ = ["KeyStore"]

_PARTITION_BITS = 10
_ROWS_HELD = 1 << 21

Keys = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]


class KeyStore:
    """Store of keys with positions; a key is one or more uint64, the first uniformly distributed.

    Above two million rows they go to 1024 files by the first bits of their keys, and one file at a
    time is in memory.  The result does not depend on it.

    Args:
        directory: directory for the files, removed by its owner.
        columns: number of uint64 of a key.
        rows_held: number of rows that stay in memory.
    """

    def __init__(self, directory: Path, columns: int, *, rows_held: int = _ROWS_HELD) -> None:
        self._directory = directory
        self._columns = columns
        self._rows_held = rows_held
        self._pending: list[Keys] = []
        self._pending_rows = 0
        self._spilled = False

    def add(self, keys: Keys, positions: Positions) -> None:
        """Add rows.

        Args:
            keys: (rows, columns).
            positions: (rows,).
        """
        rows = np.column_stack([keys, positions.astype(np.uint64)])
        self._pending.append(rows)
        self._pending_rows += len(rows)
        if self._pending_rows >= self._rows_held:
            self._spill()

    def buckets(self) -> Iterator[tuple[Positions, Positions]]:
        """Yield the positions of keys that occur at least twice, and the index of each key's first.

        Keys are sorted over all that is yielded, and so are the positions of a key.
        """
        if self._spilled:
            self._spill()
            for partition in range(1 << _PARTITION_BITS):
                path = self._path(partition)
                if path.exists():
                    with disk_errors(path):
                        rows = np.fromfile(path, np.uint64).reshape(-1, self._columns + 1)
                        path.unlink()
                    yield from self._equal(rows)
        elif self._pending:
            rows = np.concatenate(self._pending)
            self._pending = []
            yield from self._equal(rows)

    def _equal(self, rows: Keys) -> Iterator[tuple[Positions, Positions]]:
        # The last key is the primary one.
        order = np.lexsort([rows[:, column] for column in range(self._columns, -1, -1)])
        rows = rows[order]
        same = (rows[1:, :-1] == rows[:-1, :-1]).all(axis=1)
        if not same.any():
            return
        after = np.concatenate([[False], same])
        shared = after | np.concatenate([same, [False]])
        positions = rows[shared, -1].astype(np.int64)
        yield positions, np.flatnonzero(~after[shared])

    def _spill(self) -> None:
        if not self._pending_rows:
            return
        rows = np.concatenate(self._pending)
        self._pending, self._pending_rows, self._spilled = [], 0, True
        partitions = (rows[:, 0] >> np.uint64(64 - _PARTITION_BITS)).astype(np.int64)
        order = np.argsort(partitions, kind="stable")
        rows = rows[order]
        ends = np.cumsum(np.bincount(partitions, minlength=1 << _PARTITION_BITS))
        start = 0
        for partition, end in enumerate(ends.tolist()):
            if end > start:
                path = self._path(partition)
                with disk_errors(path), path.open("ab") as file:
                    file.write(rows[start:end].tobytes())
            start = end

    def _path(self, partition: int) -> Path:
        return self._directory / f"keys-{partition:04}"
