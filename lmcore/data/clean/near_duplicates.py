"""Step `near`: of documents that are nearly the same it keeps the first.

MinHash finds pairs that are worth a look, their shingles decide, and documents that are connected
by pairs, over any number of others, are one group.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

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
# In a larger bucket a document is compared with one of each group, and of so many groups, only:
# the pairs of a hundred thousand pages that share a menu are more than anyone can compare.
_EVERY_PAIR_UP_TO = 64
_GROUPS_COMPARED = 64
_PAIRS_BETWEEN_REPORTS = 100


@dataclass(frozen=True)
class BandHashes:
    """Makes of a document's text a number for each band of its signature."""

    minhash: MinHash

    def keys(self, documents: Sequence[Document]) -> npt.NDArray[np.uint64]:
        """Return (documents, bands)."""
        texts = [document.text for document in documents]
        return self.minhash.band_keys(self.minhash.signatures(texts))


@dataclass(frozen=True)
class NearDuplicates:
    """Keeps the first document of each group of similar ones.

    Attributes:
        minhash: Finds the pairs.
        similarity: The least share of common shingles that makes a pair.
        key: Where the text is.
    """

    minhash: MinHash
    similarity: float
    key: str

    @property
    def key_maker(self) -> BandHashes:
        """See `CorpusStep`."""
        return BandHashes(self.minhash)

    @property
    def has_own_row(self) -> bool:
        """See `CorpusStep`."""
        return True

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
    """Compares the documents of a bucket and joins those that are similar."""

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
        """Join the documents at the positions of *bucket*, which are in order."""
        if len(bucket) <= _EVERY_PAIR_UP_TO:
            for at, second in enumerate(bucket):
                for first in bucket[:at]:
                    self._join(first, second)
            return
        heads: list[int] = []
        for position in bucket:
            leader = self.found.find(position)
            if any(self.found.find(head) == leader for head in heads):
                continue
            if not any(self._join(head, position) for head in heads):
                heads = [*heads, position][:_GROUPS_COMPARED]

    def _join(self, first: int, second: int) -> bool:
        """Join two documents if they are similar; return whether they are in one group."""
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
        one, other = self._shingles(first), self._shingles(second)
        low, high = sorted((one.size, other.size))
        least = self._step.similarity
        # The smaller set over the larger one is as similar as they can be.
        return low >= least * high and jaccard(one, other) >= least

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
