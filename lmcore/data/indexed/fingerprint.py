"""A short key of a data set's content, by which it is known again wherever it lies."""

from __future__ import annotations

import hashlib

import numpy as np

from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import SequenceFacts, sequence_facts

__all__ = ["source_key"]

_PIECE = 1 << 14
_PIECES = 16


def source_key(
    indexed: IndexedDataset,
    sequence_range: tuple[int, int],
    *,
    facts: SequenceFacts | None = None,
) -> str:
    """Return a key of a range of sequences: all sizes, and pieces of the tokens from end to end.

    It changes where a file is replaced, cut, extended or reordered; single tokens that are
    altered in place, all sizes kept, may go unseen.

    Args:
        indexed: The data set.
        sequence_range: First sequence, and the one after the last.
        facts: Of the range, if they are known; else they are taken in a pass over the sizes.
    """
    start, end = sequence_range
    digest = hashlib.blake2b(str(indexed.dtype).encode(), digest_size=16)
    known = facts or sequence_facts(indexed, sequence_range)
    digest.update(known.digest.encode())
    for number in (
        np.unique(np.linspace(start, end - 1, _PIECES).astype(np.int64)) if end > start else ()
    ):
        digest.update(np.ascontiguousarray(indexed.get(int(number))[:_PIECE]).data)
    return digest.hexdigest()
