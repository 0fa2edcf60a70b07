"""Removal of duplicates: the steps `exact` and `near`, and the second part of `url`.

Exact duplicates have the same digest of their text or URL.  Near duplicates are found with MinHash
and locality-sensitive hashing (LSH): documents in the same bucket of some band are candidate pairs;
the Jaccard similarity of their shingles decides.  Connected pairs form clusters (union-find), and
the first document of a cluster, its representative, is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.files import disk_errors
from lmcore_data_tools.clean.corpus_step import StepContext, count_seen, keep_representatives
from lmcore_data_tools.clean.document import Document, EntryBatch, field_of
from lmcore_data_tools.clean.document_store import DocumentStore
from lmcore_data_tools.clean.filter.url import normalized
from lmcore_data_tools.clean.minhash import MinHash, jaccard, shingle_set
from lmcore_data_tools.clean.segment import Processed
from lmcore_data_tools.clean.union_find import UnionFind

__all__ = ["ExactDuplicates", "KeyStore", "NearDuplicates"]

_SHINGLES_HELD = 64 << 20  # bytes
_PAIRS_HELD = 1 << 16
# In a larger bucket a document is only compared with the representatives of so many clusters: a
# hundred thousand pages that share a menu have too many pairs.
_EVERY_PAIR_UP_TO = 64
_CLUSTERS_COMPARED = 64
_PAIRS_BETWEEN_REPORTS = 100
_PARTITION_BITS = 10
_ROWS_HELD = 1 << 21
Keys = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Digest:
    """Digest of 128 bits of a document's text or URL."""

    of: Literal["text", "url"]

    def keys(self, documents: Sequence[Document]) -> npt.NDArray[np.uint64]:
        """Return the digests, (documents, 2)."""
        digests = b"".join(self._digest(document) for document in documents)
        return np.frombuffer(digests, "<u8").reshape(-1, 2)

    def _digest(self, document: Document) -> bytes:
        value = document.text if self.of == "text" else normalized(document.url)
        content = value.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True)
class ExactDuplicates:
    """Corpus step that keeps the first document with each text or URL."""

    of: Literal["text", "url"] = "text"

    @property
    def key_maker(self) -> _Digest:
        """See `CorpusStep`."""
        return _Digest(self.of)

    @property
    def has_own_row(self) -> bool:
        """False for URLs, whose row belongs to the rules of the step `url`."""
        return self.of == "text"

    def run(
        self, batches: Iterator[Processed], context: StepContext
    ) -> Generator[EntryBatch, None, None]:
        """See `CorpusStep`."""
        store = KeyStore(context.directory, columns=2)
        with closing(DocumentStore(context.directory / "documents")) as documents:
            for batch in batches:
                count_seen(self, context, batch)
                if batch.keys is not None:
                    store.add(batch.keys, len(documents) + np.arange(len(batch.entries)))
                documents.append(batch.entries)
            documents.flush()
            clusters = UnionFind(context.directory / "union-find", len(documents))
            for positions, starts in store.buckets():
                clusters.union_rows(positions, starts)
            yield from keep_representatives(documents, clusters, context, "duplicate")


@dataclass(frozen=True)
class _BandHashes:
    """Hash of each band of a document's MinHash signature: its LSH buckets."""

    minhash: MinHash

    def keys(self, documents: Sequence[Document]) -> npt.NDArray[np.uint64]:
        """Return the bucket of each band, (documents, bands)."""
        texts = [document.text for document in documents]
        return self.minhash.band_keys(self.minhash.signatures(texts))


@dataclass(frozen=True)
class NearDuplicates:
    """Corpus step that keeps the first document of each cluster of near duplicates.

    Attributes:
        minhash: hash functions of the signatures.
        similarity: minimum Jaccard similarity of a pair.
        key: key of the text.
    """

    minhash: MinHash
    similarity: float
    key: str
    has_own_row: ClassVar[bool] = True

    @property
    def key_maker(self) -> _BandHashes:
        """See `CorpusStep`."""
        return _BandHashes(self.minhash)

    def run(
        self, batches: Iterator[Processed], context: StepContext
    ) -> Generator[EntryBatch, None, None]:
        """See `CorpusStep`."""
        store = KeyStore(context.directory, columns=1)
        with closing(DocumentStore(context.directory / "documents")) as documents:
            for batch in batches:
                count_seen(self, context, batch)
                if batch.keys is not None:
                    positions = len(documents) + np.arange(len(batch.entries))
                    rows = np.repeat(positions, self.minhash.bands)
                    store.add(batch.keys.reshape(-1, 1), rows)
                documents.append(batch.entries)
            documents.flush()
            clusters = _Clusters(self, documents, context)
            for positions, starts in store.buckets():
                ends = [*starts[1:].tolist(), len(positions)]
                for start, end in zip(starts.tolist(), ends, strict=True):
                    clusters.compare_bucket(positions[start:end].tolist())
            yield from keep_representatives(documents, clusters.found, context, "near duplicate")


class _Clusters:
    """Clusters of similar documents, found by comparing the documents of each bucket."""

    def __init__(
        self, step: NearDuplicates, documents: DocumentStore, context: StepContext
    ) -> None:
        self.found = UnionFind(context.directory / "union-find", len(documents))
        self._step, self._documents, self._context = step, documents, context
        self._held: OrderedDict[int, npt.NDArray[np.uint64]] = OrderedDict()
        self._held_bytes = 0
        self._compared = 0
        self._similar = lru_cache(_PAIRS_HELD)(self._compare)

    def compare_bucket(self, bucket: list[int]) -> None:
        """Cluster the similar documents among the positions of *bucket*, in ascending order."""
        if len(bucket) <= _EVERY_PAIR_UP_TO:
            for at, second in enumerate(bucket):
                for first in bucket[:at]:
                    self._join(first, second)
            return
        representatives: list[int] = []
        for position in bucket:
            cluster = self.found.find(position)
            if any(self.found.find(other) == cluster for other in representatives):
                continue
            if not any(self._join(other, position) for other in representatives):
                representatives = [*representatives, position][:_CLUSTERS_COMPARED]

    def _join(self, first: int, second: int) -> bool:
        """Cluster two documents if they are similar; return True if they share a cluster."""
        if self.found.find(first) == self.found.find(second):
            return True
        if self._similar(first, second):
            self.found.union(first, second)
            return True
        return False

    def _compare(self, first: int, second: int) -> bool:
        self._compared += 1
        if self._compared % _PAIRS_BETWEEN_REPORTS == 0:
            self._context.compared(self._compared)
        shingles, others = self._shingles(first), self._shingles(second)
        low, high = sorted((shingles.size, others.size))
        minimum = self._step.similarity
        # The ratio of the sizes is an upper bound of the similarity.
        return low >= minimum * high and jaccard(shingles, others) >= minimum

    def _shingles(self, position: int) -> npt.NDArray[np.uint64]:
        if position not in self._held:
            record = json.loads(self._documents.read(position).raw)
            text = field_of(record, self._step.key, flag="--key")
            made = shingle_set(text, self._step.minhash.shingle)
            self._held[position] = made
            self._held_bytes += made.nbytes
            while self._held_bytes > _SHINGLES_HELD and len(self._held) > 2:
                self._held_bytes -= self._held.popitem(last=False)[1].nbytes
        self._held.move_to_end(position)
        return self._held[position]


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
