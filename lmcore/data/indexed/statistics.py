"""What an index follows from: how many tokens a range of sequences has, and a hash of its sizes.

Both take a pass over the sizes, which a warm start cannot afford for a large dataset.  They are
therefore recorded beside the cached indices, with the state of the `.idx` that they were taken
from: the file's size, inode, and times of change.  Whatever touches the file changes its state, and
the pass is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.durable import write_atomically

__all__ = ["SequenceFacts", "record_facts", "sequence_facts"]

_log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_SETTLED_SECONDS = 3.0
"""A file changed more recently may change once more without its times showing it."""


@dataclass(frozen=True)
class SequenceFacts:
    """Of a range of sequences.

    Attributes:
        tokens: How many there are.
        digest: Hash of the sizes in order, and of where documents begin among them.
    """

    tokens: int
    digest: str


def sequence_facts(
    indexed: IndexedDataset, sequence_range: tuple[int, int], *, record_dir: Path | None = None
) -> SequenceFacts:
    """Return the facts of a range of sequences, in a time that does not depend on its size.

    Args:
        indexed: The dataset.
        sequence_range: First sequence, and the one after the last.
        record_dir: Where facts are recorded, if it is there and can be written; None: they are
            taken anew each time, in a pass over the sizes.
    """
    start, end = sequence_range
    if not 0 <= start <= end <= len(indexed.sizes):
        raise ValueError(f"sequences {sequence_range} of {len(indexed.sizes)}")
    if record_dir is None:
        return _take(indexed, start, end)
    known = _read(_record(indexed, sequence_range, record_dir), _state(indexed))
    if known is not None:
        return known
    before = _state(indexed)
    facts = _take(indexed, start, end)
    if before == _state(indexed):
        record_facts(indexed, sequence_range, facts, record_dir)
    return facts


def record_facts(
    indexed: IndexedDataset,
    sequence_range: tuple[int, int],
    facts: SequenceFacts,
    record_dir: Path,
) -> None:
    """Record facts that were just taken, if the directory is there and can be written.

    Without the record all is right, only slower.
    """
    record = _record(indexed, sequence_range, record_dir)
    state = _state(indexed)
    age = time.time() - max(state["mtime_ns"], state["ctime_ns"]) / 1e9
    if age < _SETTLED_SECONDS or record.exists() or not record_dir.is_dir():
        return
    values = {"file": str(indexed.idx_path), "state": state, **vars(facts)}
    try:
        write_atomically(record, json.dumps(values).encode())
    except OSError as error:
        _log.debug("`%s` is not recorded: %s", record, error)


def _take(indexed: IndexedDataset, start: int, end: int) -> SequenceFacts:
    digest = hashlib.blake2b(digest_size=16)
    tokens = 0
    for at in range(start, end, _CHUNK):
        sizes = np.ascontiguousarray(indexed.sizes[at : min(at + _CHUNK, end)])
        digest.update(np.require(sizes, requirements=["A"]).data)
        tokens += int(sizes.sum(dtype=np.int64))
    documents = indexed.document_indices
    # Not searchsorted, which copies what lies unaligned in a file.
    first, last = bisect_left(documents, start), bisect_left(documents, end)
    digest.update(f"{end - start} sequences, {last - first} documents".encode())

    def chunks() -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        for at in range(first, last, _CHUNK):
            yield at - first, documents[at : min(at + _CHUNK, last)] - start

    if any(not np.array_equal(part, np.arange(at, at + len(part))) for at, part in chunks()):
        for _, part in chunks():  # not one sequence a document
            digest.update(part.tobytes())
    return SequenceFacts(tokens, digest.hexdigest())


def _record(indexed: IndexedDataset, sequence_range: tuple[int, int], directory: Path) -> Path:
    start, end = sequence_range
    place = f"{indexed.idx_path.resolve()} {start} {end}"
    return directory / f"facts-{hashlib.blake2b(place.encode(), digest_size=12).hexdigest()}.json"


def _state(indexed: IndexedDataset) -> dict[str, int]:
    """Return what changes when the `.idx` does, and what was read of it, lest it changed since."""
    found = indexed.idx_path.stat()
    return {
        "bytes": found.st_size,
        "inode": found.st_ino,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "sequences": len(indexed.sizes),
        "tokens": indexed.tokens,
    }


def _read(record: Path, state: dict[str, int]) -> SequenceFacts | None:
    try:
        values: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if values["state"] != state:
            with suppress(OSError):
                record.unlink(missing_ok=True)  # makes room for the next one
            return None
        return SequenceFacts(int(values["tokens"]), str(values["digest"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
