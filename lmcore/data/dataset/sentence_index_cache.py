"""What a mapping of sentences follows from, for the cache of indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lmcore.data.cache.array_store import Arrays
from lmcore.data.dataset.sentence_index import build_block_mapping, build_segment_mapping
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import SequenceFacts, sequence_facts
from lmcore.data.native import Counter

__all__ = ["BlockRequest", "SegmentRequest"]


@dataclass(frozen=True)
class _MappingRequest:
    """What both mappings follow from, of a range of documents."""

    document_range: tuple[int, int]
    sequence_range: tuple[int, int]
    num_samples: int | None
    longest: int

    def settings(self) -> Mapping[str, object]:
        """Return all fields."""
        return vars(self)

    def work(self, facts: SequenceFacts) -> int:  # noqa: ARG002  # follows from the samples
        """Return the number of samples, where it is known."""
        return self.num_samples or 0

    def _documents(self, indexed: IndexedDataset) -> npt.NDArray[np.int64]:
        """Return the first sequence of each document, and where the last one ends."""
        first, last = self.document_range
        return indexed.document_indices[first : last + 1]


@dataclass(frozen=True)
class SegmentRequest(_MappingRequest):
    """The mapping of `build_segment_mapping` over a range of documents."""

    short_probability: float
    seed: int
    least_sentences: int
    kind: ClassVar[str] = "mapping of sentences"

    def build(self, indexed: IndexedDataset, progress: Counter) -> Arrays:
        """Build the mapping."""
        mapping = build_segment_mapping(
            self._documents(indexed),
            indexed.sizes,
            num_samples=self.num_samples,
            longest=self.longest,
            short_probability=self.short_probability,
            seed=self.seed,
            least_sentences=self.least_sentences,
            progress=progress,
        )
        return {"mapping": mapping}


@dataclass(frozen=True)
class BlockRequest(_MappingRequest):
    """The mapping of `build_block_mapping` over a range of documents.

    Attributes:
        titles: Tokens of each title, of the whole dataset; None: there are no titles.
        longest_title: Longer titles count as so long.
    """

    seed: int
    one_sentence: bool
    titles: IndexedDataset | None
    longest_title: int
    kind: ClassVar[str] = "mapping of blocks"

    def settings(self) -> Mapping[str, object]:
        """Return all fields, the titles by a hash of their sizes."""
        facts = None if self.titles is None else sequence_facts(self.titles, self.document_range)
        return {**vars(self), "titles": facts.digest if facts else None}

    def build(self, indexed: IndexedDataset, progress: Counter) -> Arrays:
        """Build the mapping."""
        mapping = build_block_mapping(
            self._documents(indexed),
            indexed.sizes,
            self._title_sizes(),
            num_samples=self.num_samples,
            longest=self.longest,
            seed=self.seed,
            one_sentence=self.one_sentence,
            progress=progress,
        )
        return {"mapping": mapping}

    def _title_sizes(self) -> npt.NDArray[np.int32]:
        first, last = self.document_range
        if self.titles is None:
            return np.zeros(last - first, dtype=np.int32)
        return np.minimum(self.titles.sizes[first:last], np.int32(self.longest_title))
