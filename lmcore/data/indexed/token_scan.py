"""Scan of a dataset's tokens: histogram of ids, duplicate documents, end-of-document tokens.

One pass reads the `.bin` in pieces and keeps a 64-bit hash of each document in a temporary file,
so that memory is bounded whatever the size.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import file_changed
from lmcore.data.indexed.idx_reader import Index
from lmcore.data.indexed.idx_writer import NumberSpool
from lmcore.data.indexed.mapped_files import MappedFiles

__all__ = ["TokenScan", "document_bounds", "scan_tokens"]

_PIECE_TOKENS = 1 << 22
_DOCUMENTS = 1 << 16
_HIGHEST_COUNTED = 1 << 24  # larger ids are counted together; the histogram takes 128 MiB
_SORTED_HASHES = 1 << 24
_EXAMPLES = 10

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True)
class TokenScan:
    """Result of a pass over all tokens.

    Attributes:
        distinct: Number of different ids from 0 to 2**24 - 1.
        lowest: Lowest id; None if there are no tokens.
        highest: Highest id; None if there are no tokens.
        frequent: Most frequent ids and their counts, the most frequent first.
        beyond: Number of tokens with negative ids or ids from 2**24 on, not in `frequent`.
        outside: Number of tokens outside the vocabulary; None if its size is unknown.
        duplicates: Number of documents that equal an earlier one.
        duplicate_examples: Some duplicates, each with the first document that it equals.
        eod: Id of the end-of-document token; None if unknown.
        ended: Number of documents that end with it; None if unknown.
        ends_inside: Number of end-of-document tokens elsewhere; None if unknown.
    """

    distinct: int
    lowest: int | None
    highest: int | None
    frequent: tuple[tuple[int, int], ...]
    beyond: int
    outside: int | None
    duplicates: int
    duplicate_examples: tuple[tuple[int, int], ...]
    eod: int | None
    ended: int | None
    ends_inside: int | None


def scan_tokens(
    dataset: IndexedDataset, *, eod: int | None, vocab_size: int | None, top: int = 10
) -> TokenScan:
    """Read all tokens of a dataset once.

    Args:
        dataset: The dataset.
        eod: Id of the end-of-document token; None if unknown.
        vocab_size: Number of ids in the vocabulary; None if unknown.
        top: Number of most frequent ids to return.

    Raises:
        DataError: The `.bin` cannot be read to its end.
    """
    counts = _Counts(eod, vocab_size)
    ended = 0
    with closing(NumberSpool(Path(tempfile.gettempdir()), "Q")) as hashes:
        for tokens, digests, lasts in _pieces(dataset):
            counts.add(tokens)
            hashes.extend(digests)
            ended += 0 if eod is None else int(np.count_nonzero(lasts == eod))
        duplicates, examples = _duplicates(hashes)
    return TokenScan(
        distinct=int(np.count_nonzero(counts.histogram)),
        lowest=counts.lowest,
        highest=counts.highest,
        frequent=counts.frequent(top),
        beyond=counts.beyond,
        outside=counts.outside if vocab_size is not None else None,
        duplicates=duplicates,
        duplicate_examples=examples,
        eod=eod,
        ended=None if eod is None else ended,
        ends_inside=None if eod is None else counts.ends - ended,
    )


def document_bounds(index: Index) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the bounds of documents in tokens, int64, in pieces that overlap by one bound."""
    files = MappedFiles(index.starts)
    for at in range(0, index.document_count, _DOCUMENTS):
        with files.reading("the index"):
            firsts = index.document_indices[at : at + _DOCUMENTS + 1]
            bounds = np.full(len(firsts), index.tokens, dtype=np.int64)
            inside = firsts < len(index.sizes)
            bounds[inside] = index.starts[firsts[inside]] // index.unit
        yield bounds


_Piece = tuple[Tokens, npt.NDArray[np.uint64], Tokens]


def _pieces(dataset: IndexedDataset) -> Iterator[_Piece]:
    """Yield all tokens in pieces, each with hashes and last tokens of the documents ending in it.

    Only documents without tokens have the hash 0; they have no last token.
    """
    with dataset.bin_path.open("rb", buffering=0) as file:
        for bounds in document_bounds(dataset.index):
            first, count = 0, len(bounds) - 1
            while first < count:
                fits = int(np.searchsorted(bounds, bounds[first] + _PIECE_TOKENS, side="right")) - 1
                if fits == first:
                    yield from _long_document(file, dataset, int(bounds[first + 1] - bounds[first]))
                    first += 1
                else:
                    yield _documents(file, dataset, bounds[first : fits + 1] - bounds[first])
                    first = fits


def _documents(file: BinaryIO, dataset: IndexedDataset, bounds: npt.NDArray[np.int64]) -> _Piece:
    """Read the documents of a piece; *bounds* are relative to its start."""
    width = dataset.dtype.itemsize
    content = memoryview(_read(file, int(bounds[-1]) * width, dataset.bin_path))
    cuts = (bounds * width).tolist()
    digests = b"".join(
        blake2b(content[at:end], digest_size=8).digest() if end > at else bytes(8)
        for at, end in pairwise(cuts)
    )
    filled = np.diff(bounds) > 0
    hashes = np.frombuffer(digests, dtype="<u8").copy()
    hashes[filled & (hashes == 0)] = 1
    tokens = np.frombuffer(content, dtype=dataset.dtype)
    return tokens, hashes, tokens[bounds[1:][filled] - 1]


def _long_document(file: BinaryIO, dataset: IndexedDataset, length: int) -> Iterator[_Piece]:
    """Read one document in several pieces."""
    width, hasher = dataset.dtype.itemsize, blake2b(digest_size=8)
    for at in range(0, length, _PIECE_TOKENS):
        size = min(_PIECE_TOKENS, length - at)
        content = _read(file, size * width, dataset.bin_path)
        hasher.update(content)
        tokens = np.frombuffer(content, dtype=dataset.dtype)
        if at + size < length:
            yield tokens, np.empty(0, dtype=np.uint64), tokens[:0]
        else:
            digest = int.from_bytes(hasher.digest(), "little") or 1
            yield tokens, np.array([digest], dtype=np.uint64), tokens[-1:]


def _read(file: BinaryIO, count: int, path: Path) -> bytes:
    pieces, left = [], count
    try:
        while left and (piece := file.read(left)):
            pieces.append(piece)
            left -= len(piece)
    except OSError as error:
        raise DataError(f"cannot read `{path}`", why=error.strerror or str(error)) from error
    if left:
        raise file_changed(path)
    return b"".join(pieces)


class _Counts:
    """Histogram of ids."""

    def __init__(self, eod: int | None, vocab_size: int | None) -> None:
        self.histogram = np.zeros(1 << 8, dtype=np.int64)
        self.lowest: int | None = None
        self.highest: int | None = None
        self.beyond = self.outside = self.ends = 0
        self._eod, self._vocab_size = eod, vocab_size

    def add(self, tokens: Tokens) -> None:
        """Count the tokens of a piece."""
        if not tokens.size:
            return
        low, high = int(tokens.min()), int(tokens.max())
        self.lowest = low if self.lowest is None else min(low, self.lowest)
        self.highest = high if self.highest is None else max(high, self.highest)
        if self._eod is not None:
            self.ends += int(np.count_nonzero(tokens == self._eod))
        if self._vocab_size is not None and (low < 0 or high >= self._vocab_size):
            self.outside += int(np.count_nonzero((tokens < 0) | (tokens >= self._vocab_size)))
        if low < 0 or high >= _HIGHEST_COUNTED:
            kept = tokens[(tokens >= 0) & (tokens < _HIGHEST_COUNTED)]
            self.beyond += tokens.size - kept.size
            tokens = kept
        found = np.bincount(tokens, minlength=len(self.histogram))
        found[: len(self.histogram)] += self.histogram
        self.histogram = found

    def frequent(self, top: int) -> tuple[tuple[int, int], ...]:
        """Return the most frequent ids and their counts; equal counts by id."""
        most = np.argsort(-self.histogram, kind="stable")[:top]
        return tuple((int(i), int(self.histogram[i])) for i in most if self.histogram[i])


def _duplicates(hashes: NumberSpool) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the number of documents that equal an earlier one, and examples."""
    total, examples = 0, []
    buckets = 1 << max(0, math.ceil(math.log2(max(1, len(hashes)) / _SORTED_HASHES)))
    for bucket in range(buckets):
        values, documents = _bucket(hashes, bucket, buckets)
        order = np.argsort(values, kind="stable")
        values, documents = values[order], documents[order]
        same = np.flatnonzero(values[1:] == values[:-1]) + 1
        total += len(same)
        # The first document of a run of equal hashes is the original.
        firsts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
        run_of = np.searchsorted(firsts, same, side="right") - 1
        pairs = np.stack([documents[same], documents[firsts[run_of]]], axis=1)
        examples += pairs[np.argsort(pairs[:, 0])[:_EXAMPLES]].tolist()
    return total, tuple((int(copy), int(first)) for copy, first in sorted(examples)[:_EXAMPLES])


def _bucket(
    hashes: NumberSpool, bucket: int, buckets: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return the hashes of a bucket, and their documents."""
    values: list[npt.NDArray[np.uint64]] = [np.empty(0, dtype=np.uint64)]
    documents: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    at = 0
    for chunk in hashes.chunks():
        here = (chunk != 0) & (chunk % np.uint64(buckets) == bucket)
        values.append(chunk[here].astype(np.uint64, copy=False))
        documents.append(np.flatnonzero(here) + at)
        at += len(chunk)
    return np.concatenate(values), np.concatenate(documents)
