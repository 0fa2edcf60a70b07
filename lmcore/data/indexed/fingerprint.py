"""Fingerprint of a dataset's content; independent of its path."""

from __future__ import annotations

import hashlib

import numpy as np

from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import SequenceStatistics, sequence_statistics

__all__ = ["content_fingerprint"]

_PIECE = 1 << 14
_PIECES = 16


def content_fingerprint(
    indexed: IndexedDataset,
    sequence_range: tuple[int, int],
    *,
    statistics: SequenceStatistics | None = None,
) -> str:
    """Return a fingerprint of a range of sequences: 32 hexadecimal digits.

    It is a hash of all sizes and of tokens at 16 evenly spaced sequences.  It changes if a file is
    replaced, cut, extended or reordered; single tokens changed in place may go unnoticed.

    Args:
        indexed: The dataset.
        sequence_range: First sequence, and the one after the last.
        statistics: Statistics of the range, if known; otherwise they take a pass over the sizes.
    """
    start, end = sequence_range
    digest = hashlib.blake2b(str(indexed.dtype).encode(), digest_size=16)
    known = statistics or sequence_statistics(indexed, sequence_range)
    digest.update(known.digest.encode())
    for number in (
        np.unique(np.linspace(start, end - 1, _PIECES).astype(np.int64)) if end > start else ()
    ):
        with indexed.reading(f"sequence {number}"):
            digest.update(np.ascontiguousarray(indexed.get(int(number))[:_PIECE]).data)
    return digest.hexdigest()
