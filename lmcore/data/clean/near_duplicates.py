"""Step `near`: near-duplicate removal with MinHash and locality-sensitive hashing (LSH).

Documents in the same bucket of some band are candidate pairs; the Jaccard similarity of their
shingles decides.  Connected pairs form clusters (union-find), and the first document of a cluster,
its representative, is kept.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lmcore.data.clean.corpus_step import StepContext, count_seen, keep_representatives
from lmcore.data.clean.document import Document, EntryBatch, field_of
from lmcore.data.clean.document_store import DocumentStore
from lmcore.data.clean.key_store import KeyStore
from lmcore.data.clean.minhash import MinHash, jaccard, shingle_set
from lmcore.data.clean.segment import Processed
from lmcore.data.clean.union_find import UnionFind

__all__ = ["BandHashes", "NearDuplicates"]

_SHINGLES_HELD = 64 << 20  # bytes
_PAIRS_HELD = 1 << 16
# In a larger bucket a document is only compared with the representatives of so many clusters: a
# hundred thousand pages that share a menu have too many pairs.
_EVERY_PAIR_UP_TO = 64
_CLUSTERS_COMPARED = 64
_PAIRS_BETWEEN_REPORTS = 100


@dataclass(frozen=True)
class BandHashes:
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
    def key_maker(self) -> BandHashes:
        """See `CorpusStep`."""
        return BandHashes(self.minhash)

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
