"""Requests for sentence indices, for the index cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lmcore.data.cache.array_store import Arrays
from lmcore.data.dataset.sentence_index import build_block_mapping, build_segment_mapping
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import SequenceStatistics, sequence_statistics
from lmcore.data.native import Counter

__all__ = ["BlockRequest", "SegmentRequest"]


@dataclass(frozen=True)
class _MappingRequest:
    """Settings of both kinds of sentence index, over a range of documents."""

    document_range: tuple[int, int]
    sequence_range: tuple[int, int]
    num_samples: int | None
    longest: int

    def settings(self) -> Mapping[str, object]:
        """Return all fields, for the cache's key."""
        return vars(self)

    def work(self, statistics: SequenceStatistics) -> int:  # noqa: ARG002  # `build` counts samples
        """Return the number of samples; 0 if unknown."""
        return self.num_samples or 0

    def _documents(self, indexed: IndexedDataset) -> npt.NDArray[np.int64]:
        """Return the first sequence of each document, and the end of the last."""
        first, last = self.document_range
        return indexed.document_indices[first : last + 1]


@dataclass(frozen=True)
class SegmentRequest(_MappingRequest):
    """Request for the rows of `build_segment_mapping` over a range of documents."""

    short_probability: float
    seed: int
    least_sentences: int
    kind: ClassVar[str] = "mapping of sentences"

    def build(self, indexed: IndexedDataset, progress: Counter) -> Arrays:
        """Build the rows, under the name `mapping`."""
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
    """Request for the rows of `build_block_mapping` over a range of documents.

    Attributes:
        titles: Dataset of titles, one sequence per document; None: there are no titles.
        longest_title: Tokens that a title is cut to.
    """

    seed: int
    one_sentence: bool
    titles: IndexedDataset | None
    longest_title: int
    kind: ClassVar[str] = "mapping of blocks"

    def settings(self) -> Mapping[str, object]:
        """Return all fields, for the cache's key, with a hash of the titles' sizes."""
        titles = self.titles
        digest = titles and sequence_statistics(titles, self.document_range).digest
        return {**vars(self), "titles": digest}

    def build(self, indexed: IndexedDataset, progress: Counter) -> Arrays:
        """Build the rows, under the name `mapping`."""
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
