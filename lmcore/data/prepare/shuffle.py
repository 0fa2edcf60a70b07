"""Shuffling of an unfinished dataset: its documents in a random order, in bounded memory.

Every document gets a random key of 64 bits, from the seed and its place in the input; the documents
in the order of their keys are the result, which therefore depends on nothing else.  A dataset of
several times the memory is written in as many passes: each collects the documents whose keys are
in one range, and skips the tokens of the others.  Datasets of several keys with the same number of
documents get the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.files import file_changed

__all__ = ["shuffle_documents"]

_HELD_BYTES = 1 << 28
_DOCUMENT_BYTES = 200
"""Memory of a held document besides its tokens and lengths."""
_CHUNK = 1 << 16
_KEYS = 1 << 64


@dataclass(frozen=True)
class _Documents:
    """Consecutive documents: arrays of the files, and the byte offsets [documents + 1]."""

    per_document: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    first_lengths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]


def shuffle_documents(
    source: Sequence[Path],
    target: Sequence[Path],
    *,
    token_bytes: int,
    seed: int,
    held_bytes: int = _HELD_BYTES,
) -> None:
    """Write the documents of *source* to *target* in the order of their random keys.

    Args:
        source: files of a `PartialDataset`: tokens, lengths of sequences, sequences of documents.
        target: the same of the result.
        token_bytes: size of a stored token, in bytes.
        seed: seed of the keys.
        held_bytes: documents in memory at a time, in bytes; one document may be larger.
    """
    documents = source[2].stat().st_size // 4
    size = sum(path.stat().st_size for path in source) + _DOCUMENT_BYTES * documents
    passes = max(1, -(-size // held_bytes))
    bounds = [_KEYS * i // passes for i in range(passes + 1)]
    files = [path.open("wb") for path in target]
    tokens = os.open(source[0], os.O_RDONLY | os.O_CLOEXEC)
    try:
        for low, high in pairwise(bounds):
            chosen = _chosen(source, tokens, token_bytes, seed, (low, high - 1))
            for _, _, pieces in sorted(chosen):  # without a name, so that it is freed in time
                for file, piece in zip(files, pieces, strict=True):
                    file.write(piece)
    finally:
        os.close(tokens)
        for file in files:
            file.close()


def _chosen(
    source: Sequence[Path], tokens: int, token_bytes: int, seed: int, keys: tuple[int, int]
) -> Iterator[tuple[int, int, tuple[bytes, bytes, bytes]]]:
    """Yield key, number and content of the documents whose key is in a range, ends included."""
    before = 0
    for chunk in _chunks(source, token_bytes, seed):
        wanted = (chunk.keys >= np.uint64(keys[0])) & (chunk.keys <= np.uint64(keys[1]))
        for i in np.flatnonzero(wanted).tolist():
            start, end = int(chunk.offsets[i]), int(chunk.offsets[i + 1])
            lengths = chunk.lengths[chunk.first_lengths[i] : chunk.first_lengths[i + 1]]
            count = chunk.per_document[i : i + 1]
            content = (_read(source[0], tokens, start, end), lengths.tobytes(), count.tobytes())
            yield int(chunk.keys[i]), before + i, content
        before += len(chunk.keys)


def _chunks(source: Sequence[Path], token_bytes: int, seed: int) -> Iterator[_Documents]:
    numbers = np.random.Philox(seed)
    at = 0
    with source[1].open("rb") as lengths_file, source[2].open("rb") as counts_file:
        while counts := counts_file.read(4 * _CHUNK):
            per_document = np.frombuffer(counts, "<i4")
            firsts = np.concatenate(([0], np.cumsum(per_document, dtype=np.int64)))
            lengths = np.frombuffer(lengths_file.read(4 * int(firsts[-1])), "<i4")
            ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[firsts]
            offsets = at + ends * token_bytes
            keys = np.asarray(numbers.random_raw(len(per_document)), dtype=np.uint64)
            yield _Documents(per_document, lengths, firsts, offsets, keys)
            at = int(offsets[-1])


def _read(path: Path, file: int, start: int, end: int) -> bytes:
    """Return the bytes from *start* to *end* of an open file; a call reads 2 GiB at most."""
    pieces = []
    while start < end:
        piece = os.pread(file, end - start, start)
        if not piece:
            raise file_changed(path)
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
