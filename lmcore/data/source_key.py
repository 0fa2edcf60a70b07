"""A short key of a data set's content, by which it is known again wherever it lies."""

from __future__ import annotations

import hashlib

import numpy as np

from lmcore.data.indexed import IndexedDataset

__all__ = ["source_key"]

_CHUNK = 1 << 22
_PIECE = 1 << 14
_PIECES = 16


def source_key(indexed: IndexedDataset, sequence_range: tuple[int, int]) -> str:
    """Return a key of a range of sequences: all sizes, and pieces of the tokens from end to end.

    It changes where a file is replaced, cut, extended or reordered; single tokens that are
    altered in place, all sizes kept, may go unseen.

    Args:
        indexed: The data set.
        sequence_range: First sequence, and the one after the last.
    """
    start, end = sequence_range
    digest = hashlib.blake2b(str(indexed.dtype).encode(), digest_size=16)
    for at in range(start, end, _CHUNK):
        digest.update(np.ascontiguousarray(indexed.sizes[at : min(at + _CHUNK, end)]).data)
    for number in (
        np.unique(np.linspace(start, end - 1, _PIECES).astype(np.int64)) if end > start else ()
    ):
        digest.update(np.ascontiguousarray(indexed.get(int(number))[:_PIECE]).data)
    return digest.hexdigest()
