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

from lmcore.data.clean.document import Document, EntryBatch, field_of
from lmcore.data.clean.gather import Workplace, count_gathered, survivors
from lmcore.data.clean.key_store import KeyStore
from lmcore.data.clean.leaders import Leaders
from lmcore.data.clean.minhash import MinHash, jaccard, shingle_set
from lmcore.data.clean.spool import Spool
from lmcore.data.clean.work import Processed

__all__ = ["BandKeys", "NearDuplicates"]

_SHINGLES_HELD = 64 << 20  # bytes
_PAIRS_HELD = 1 << 16
# In a larger bucket a document is compared with one of each group, and of so many groups, only:
# the pairs of a hundred thousand pages that share a menu are more than anyone can compare.
_EVERY_PAIR_UP_TO = 64
_GROUPS_COMPARED = 64
_PAIRS_BETWEEN_REPORTS = 100


@dataclass(frozen=True)
class BandKeys:
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
    def key_maker(self) -> BandKeys:
        """See `Gathering`."""
        return BandKeys(self.minhash)

    @property
    def has_own_row(self) -> bool:
        """See `Gathering`."""
        return True

    def run(
        self, batches: Iterator[Processed], place: Workplace
    ) -> Generator[EntryBatch, None, None]:
        """See `Gathering`."""
        store = KeyStore(place.directory, columns=1)
        with closing(Spool(place.directory / "documents")) as spool:
            for batch in batches:
                count_gathered(self, place, batch)
                if batch.keys is not None:
                    positions = len(spool) + np.arange(len(batch.entries))
                    rows = np.repeat(positions, self.minhash.bands)
                    store.add(batch.keys.reshape(-1, 1), rows)
                spool.append(batch.entries)
            spool.flush()
            groups = _Groups(self, spool, place)
            for positions, starts in store.groups():
                ends = [*starts[1:].tolist(), len(positions)]
                for start, end in zip(starts.tolist(), ends, strict=True):
                    groups.connect(positions[start:end].tolist())
            yield from survivors(spool, groups.leaders, place, "near duplicate")


class _Groups:
    """Compares the documents of a bucket and joins those that are similar."""

    def __init__(self, step: NearDuplicates, spool: Spool, place: Workplace) -> None:
        self.leaders = Leaders(place.directory / "leaders", len(spool))
        self._step, self._spool, self._place = step, spool, place
        self._held: OrderedDict[int, npt.NDArray[np.uint64]] = OrderedDict()
        self._held_bytes = 0
        self._compared = 0
        self._similar = lru_cache(_PAIRS_HELD)(self._compare)

    def connect(self, bucket: list[int]) -> None:
        """Join the documents at the positions of *bucket*, which are in order."""
        if len(bucket) <= _EVERY_PAIR_UP_TO:
            for at, second in enumerate(bucket):
                for first in bucket[:at]:
                    self._join(first, second)
            return
        heads: list[int] = []
        for position in bucket:
            leader = self.leaders.leader(position)
            if any(self.leaders.leader(head) == leader for head in heads):
                continue
            if not any(self._join(head, position) for head in heads):
                heads = [*heads, position][:_GROUPS_COMPARED]

    def _join(self, first: int, second: int) -> bool:
        """Join two documents if they are similar; return whether they are in one group."""
        if self.leaders.leader(first) == self.leaders.leader(second):
            return True
        if self._similar(first, second):
            self.leaders.join(first, second)
            return True
        return False

    def _compare(self, first: int, second: int) -> bool:
        self._compared += 1
        if self._compared % _PAIRS_BETWEEN_REPORTS == 0:
            self._place.compared(self._compared)
        one, other = self._shingles(first), self._shingles(second)
        low, high = sorted((one.size, other.size))
        least = self._step.similarity
        # The smaller set over the larger one is as similar as they can be.
        return low >= least * high and jaccard(one, other) >= least

    def _shingles(self, position: int) -> npt.NDArray[np.uint64]:
        if position not in self._held:
            record = json.loads(self._spool.read(position).raw)
            text = field_of(record, self._step.key, flag="--key")
            made = shingle_set(text, self._step.minhash.shingle)
            self._held[position] = made
            self._held_bytes += made.nbytes
            while self._held_bytes > _SHINGLES_HELD and len(self._held) > 2:
                self._held_bytes -= self._held.popitem(last=False)[1].nbytes
        self._held.move_to_end(position)
        return self._held[position]
