"""Statistics of a range of sequences, and a fingerprint of its content.

The number of tokens and the hash of the sizes take a pass over all sizes, too slow at each start
for a large dataset.  They are therefore recorded beside the cached indices, with the state of the
`.idx`: size, inode, and modification times.  Any write to the file changes its state, and the
statistics are computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import write_atomically
from lmcore.data.indexed.dataset import IndexedDataset

__all__ = [
    "SequenceStatistics",
    "content_fingerprint",
    "record_statistics",
    "sequence_statistics",
]

_log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 20
_CHUNK = 1 << 20
_FINGERPRINT_SEQUENCES = 16
_FINGERPRINT_TOKENS = 1 << 14
_SETTLED_SECONDS = 3.0
"""Minimum age of a recorded file: a younger one may change again within its times' resolution."""


@dataclass(frozen=True)
class SequenceStatistics:
    """Statistics of a range of sequences.

    Attributes:
        tokens: Number of tokens.
        digest: Hash of the sizes in order, and of the first sequences of documents.
    """

    tokens: int
    digest: str


def sequence_statistics(
    indexed: IndexedDataset, sequence_range: tuple[int, int], *, record_dir: Path | None = None
) -> SequenceStatistics:
    """Return the statistics of a range of sequences; recorded ones take constant time.

    Args:
        indexed: The dataset.
        sequence_range: First sequence, and the one after the last.
        record_dir: Directory of the records, used if it exists and is writable.  None: compute
            them in a pass over the sizes.
    """
    start, end = sequence_range
    if not 0 <= start <= end <= len(indexed.sizes):
        raise ValueError(f"sequences {sequence_range} of {len(indexed.sizes)}")
    if record_dir is None:
        return _compute(indexed, start, end)
    known = _read(_record_path(indexed, sequence_range, record_dir), _state(indexed))
    if known is not None:
        return known
    before = _state(indexed)
    statistics = _compute(indexed, start, end)
    if before == _state(indexed):
        record_statistics(indexed, sequence_range, statistics, record_dir)
    return statistics


def record_statistics(
    indexed: IndexedDataset,
    sequence_range: tuple[int, int],
    statistics: SequenceStatistics,
    record_dir: Path,
) -> None:
    """Record statistics that were just computed, if the directory exists and is writable.

    A missing record only costs time.

    Args:
        indexed: The dataset.
        sequence_range: First sequence, and the one after the last.
        statistics: Statistics of the range.
        record_dir: Directory of the record.
    """
    record = _record_path(indexed, sequence_range, record_dir)
    state = _state(indexed)
    age = time.time() - max(state["mtime_ns"], state["ctime_ns"]) / 1e9
    if age < _SETTLED_SECONDS or record.exists() or not record_dir.is_dir():
        return
    values = {"file": str(indexed.idx_path), "state": state, **vars(statistics)}
    values["crc32"] = _checksum(values)
    try:
        write_atomically(record, json.dumps(values).encode())
    except OSError as error:
        _log.debug("cannot record `%s`: %s", record, error)


def _compute(indexed: IndexedDataset, start: int, end: int) -> SequenceStatistics:
    digest = hashlib.blake2b(digest_size=16)
    tokens = 0
    for at in range(start, end, _CHUNK):
        with indexed.reading("the sizes of the sequences"):
            sizes = np.ascontiguousarray(indexed.sizes[at : min(at + _CHUNK, end)])
            digest.update(np.require(sizes, requirements=["A"]).data)
            tokens += int(sizes.sum(dtype=np.int64))
    documents = indexed.document_indices
    # Not searchsorted, which copies an unaligned array.
    with indexed.reading("the document index"):
        first, last = bisect_left(documents, start), bisect_left(documents, end)
    digest.update(f"{end - start} sequences, {last - first} documents".encode())

    def chunks() -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        for at in range(first, last, _CHUNK):
            with indexed.reading("the document index"):
                chunk = documents[at : min(at + _CHUNK, last)] - start
            yield at - first, chunk

    if any(not np.array_equal(part, np.arange(at, at + len(part))) for at, part in chunks()):
        for _, part in chunks():  # documents of several sequences
            digest.update(part.tobytes())
    return SequenceStatistics(tokens, digest.hexdigest())


def _record_path(indexed: IndexedDataset, sequence_range: tuple[int, int], directory: Path) -> Path:
    start, end = sequence_range
    key = f"{indexed.idx_path.resolve()} {start} {end}"
    return directory / f"facts-{hashlib.blake2b(os.fsencode(key), digest_size=12).hexdigest()}.json"


def _state(indexed: IndexedDataset) -> dict[str, int]:
    """Return the state of the `.idx` on disk, and the counts that were read from it."""
    found = indexed.idx_path.stat()
    return {
        "bytes": found.st_size,
        "inode": found.st_ino,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "sequences": len(indexed.sizes),
        "tokens": indexed.tokens,
    }


def _checksum(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _read(record: Path, state: dict[str, int]) -> SequenceStatistics | None:
    try:
        values: dict[str, Any] = json.loads(read_bounded_file(record, _MAX_BYTES))
        sound = values.pop("crc32", None) == _checksum(values)
        if values["state"] != state or not sound:
            with suppress(OSError):
                record.unlink(missing_ok=True)  # makes room for the next one
            return None
        return SequenceStatistics(int(values["tokens"]), str(values["digest"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


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
        np.unique(np.linspace(start, end - 1, _FINGERPRINT_SEQUENCES).astype(np.int64))
        if end > start
        else ()
    ):
        with indexed.reading(f"sequence {number}"):
            digest.update(np.ascontiguousarray(indexed.get(int(number))[:_FINGERPRINT_TOKENS]).data)
    return digest.hexdigest()
