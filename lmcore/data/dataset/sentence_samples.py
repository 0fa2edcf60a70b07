"""What datasets of whole sentences have in common: which sentences make a sample, and its draws.

BERT, T5 and blocks with titles (`bert_dataset`, `t5_dataset`, `ict_dataset`) take their samples
from a mapping of sentences that is kept in the cache of indices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from lmcore.data.cache.index_cache import default_cache_dir, load_or_build
from lmcore.data.dataset.sentence_index_cache import BlockRequest, SegmentRequest
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.fingerprint import source_key
from lmcore.data.indexed.statistics import sequence_facts
from lmcore.errors import DataError

__all__ = ["SampleChoice", "SentenceDataset", "SentenceSamples"]


class SampleChoice(TypedDict):
    """Which samples, and where their mapping is kept: see `SentenceDataset`."""

    document_range: tuple[int, int]
    num_samples: int | None
    cache_dir: NotRequired[str | Path | None]
    name: NotRequired[str]


class SentenceSamples:
    """The samples of a mapping, in the order of training.

    Args:
        indexed: The sentences.
        request: Which mapping.
        cache_dir: Where the mapping is kept; None for a directory beside the data.
        name: First part of the cache's file names.

    Attributes:
        rows: The mapping, read-only.
        key: Tells these documents from others, wherever they lie.
        order: Fingerprint of documents and order.

    Raises:
        DataError: See `load_or_build` and `build_segment_mapping`.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        request: SegmentRequest | BlockRequest,
        *,
        cache_dir: str | Path | None,
        name: str,
    ) -> None:
        self._indexed, self._seed, self._num_samples = indexed, request.seed, request.num_samples
        records = Path(cache_dir) if cache_dir is not None else default_cache_dir(indexed)
        known = sequence_facts(indexed, request.sequence_range, record_dir=records)
        arrays = load_or_build(indexed, request, cache_dir=cache_dir, name=name, facts=known)
        self.rows: npt.NDArray[np.integer] = arrays["mapping"]
        self.key = source_key(indexed, request.sequence_range, facts=known)
        facts = [self.key, request.seed, request.kind, dict(request.settings())]
        self.order = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Return the number asked for; all that there are if none was."""
        return len(self.rows) if self._num_samples is None else self._num_samples

    def row(self, i: int) -> list[int]:
        """Return row *i* of the mapping.

        Raises:
            IndexError: No such row.
        """
        if not 0 <= i < len(self.rows):
            raise IndexError(f"sample {i} of {len(self.rows)}")
        return [int(value) for value in self.rows[i]]

    def sentences(self, first: int, last: int) -> list[npt.NDArray[np.int64]]:
        """Return the tokens of each sentence from *first* up to *last*."""
        return [self._indexed.get(i).astype(np.int64) for i in range(first, last)]

    def random(self, i: int) -> np.random.RandomState:
        """Return the generator of sample *i*: the same whenever that is read."""
        return np.random.RandomState((self._seed + i) % 2**32)

    def check_vocabulary(self, tokens: npt.NDArray[np.int64], size: int) -> None:
        """Raise `DataError` for a token that the vocabulary does not have."""
        low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
        if low < 0 or high >= size:
            raise DataError(
                f"`{self._indexed.prefix}` holds token {low if low < 0 else high}, the vocabulary "
                f"has {size}",
                why="the data set was prepared with another tokenizer, or is damaged",
                hint="give the tokenizer of the data set, or prepare it again",
            )


class SentenceDataset:
    """A dataset of samples that are made of whole sentences, in the order of training.

    Args:
        indexed: One sequence a sentence.
        request: Makes the request for a mapping of the ranges and number below.
        document_range: First document to use, and the one after the last.
        num_samples: Length of the dataset; documents repeat as needed.  None: one epoch.
        cache_dir: Where the mapping is kept; None for a directory beside the data.
        name: First part of the cache's file names, such as `train`.

    Attributes:
        samples: Which sentences make a sample, and what is drawn in it; the request's seed is
            that of both.

    Raises:
        DataError: The documents make no sample; see also `load_or_build`.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        request: Callable[..., SegmentRequest | BlockRequest],
        *,
        document_range: tuple[int, int],
        num_samples: int | None,
        cache_dir: str | Path | None = None,
        name: str = "train",
    ) -> None:
        wanted = request(
            document_range=document_range,
            sequence_range=indexed.sequence_range(document_range),
            num_samples=num_samples,
        )
        self.samples = SentenceSamples(indexed, wanted, cache_dir=cache_dir, name=name)

    def __len__(self) -> int:
        """Return the number of samples asked for; the mapping may hold a few more."""
        return len(self.samples)
