"""Repair of indices that do not count the end-of-document tokens.

Some tools append an end-of-document token to the `.bin` but do not count it in the sizes, so that
every document after the first is read at a wrong offset.  If each document is followed by the same
surplus token, the correct sizes can be restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.idx_reader import Index, map_file
from lmcore.data.indexed.token_scan import document_bounds

__all__ = ["IndexWithEod", "MissingEod", "find_missing_eod"]

Integers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class MissingEod:
    """End-of-document token that an index does not count.

    Attributes:
        token: Id of the token.
        after_empty: True if the token also follows documents without tokens.
        count: Number of such tokens.
    """

    token: int
    after_empty: bool
    count: int


def find_missing_eod(index: Index, bin_path: Path, eod: int | None = None) -> MissingEod | None:
    """Return the token that follows each document and that the index does not count.

    Args:
        index: Consistent index.
        bin_path: File of the tokens, with more tokens than the index counts.
        eod: Id of the end-of-document token; None to accept any id if there are several documents.

    Returns:
        The token, or None if it does not explain the surplus tokens.
    """
    size = bin_path.stat().st_size
    excess = size // index.dtype.itemsize - index.tokens
    if size % index.dtype.itemsize or excess < 1:
        return None
    tokens = map_file(bin_path, index.dtype)
    filled = sum(int(np.count_nonzero(np.diff(bounds))) for bounds in document_bounds(index))
    for after_empty, count in ((True, index.document_count), (False, filled)):
        if count == excess and not (after_empty and _has_document_without_sequence(index)):
            token = _common_end(index, tokens, after_empty=after_empty)
            if token is not None and (eod == token or (eod is None and count > 1)):
                return MissingEod(token, after_empty, count)
    return None


def _has_document_without_sequence(index: Index) -> bool:
    """Return True if a document has no sequence to which the token could be added."""
    bounds = index.document_indices
    step = 1 << 20
    return any(
        bool((np.diff(bounds[at : at + step + 1]) == 0).any()) for at in range(0, len(bounds), step)
    )


def _common_end(index: Index, tokens: Integers, *, after_empty: bool) -> int | None:
    """Return the token that follows all documents; None if the tokens differ."""
    found: int | None = None
    before = 0
    for bounds in document_bounds(index):
        ends = bounds[1:] if after_empty else bounds[1:][np.diff(bounds) > 0]
        followers = tokens[ends + before + np.arange(len(ends))]
        before += len(ends)
        if not len(followers):
            continue
        found = int(followers[0]) if found is None else found
        if bool((followers != found).any()):
            return None
    return found


class IndexWithEod:
    """Content of the correct index: the last sequence of each document has one more token."""

    def __init__(self, index: Index, end: MissingEod) -> None:
        self._index, self._after_empty = index, end.after_empty
        self.sequences = len(index.sizes)
        self.documents = index.document_count
        self.tokens = index.tokens + end.count
        self.multimodal = index.modes is not None

    def sizes(self) -> Iterator[Integers]:
        """Yield the number of tokens of each sequence, in pieces."""
        at = 0
        for bounds in document_bounds(self._index):
            firsts = self._index.document_indices[at : at + len(bounds)]
            at += len(bounds) - 1
            base = int(firsts[0])
            sizes = self._index.sizes[base : int(firsts[-1])].astype(np.int64)
            last = firsts[1:] - 1 - base
            takes = np.diff(firsts) > 0 if self._after_empty else np.diff(bounds) > 0
            sizes[last[takes]] += 1
            yield sizes

    def document_ends(self) -> Iterator[Integers]:
        """Yield the last sequence + 1 of each document."""
        yield self._index.document_indices[1:]

    def modes(self) -> Iterator[Integers]:
        """Yield the mode of each sequence."""
        if self._index.modes is not None:
            yield self._index.modes
