"""Base class of the datasets whose samples are made of whole sentences: BERT, T5 and ICT."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError, counted
from lmcore.data.cache.index_cache import index_cache_dir, load_or_build
from lmcore.data.dataset.sentence_index import NoSampleError
from lmcore.data.dataset.sentence_index_cache import BlockRequest, SegmentRequest
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.mapped_files import MappedFiles
from lmcore.data.indexed.statistics import content_fingerprint, sequence_statistics

__all__ = ["DatasetOptions", "SentenceDataset"]


class DatasetOptions(TypedDict):
    """Arguments of `SentenceDataset` that its subclasses pass on."""

    document_range: tuple[int, int]
    num_samples: int | None
    cache_dir: NotRequired[str | Path | None]
    name: NotRequired[str]


class SentenceDataset:
    """Samples made of whole sentences, in the order of training.

    Args:
        indexed: Dataset with one sequence per sentence.
        request: Function that makes the index's request for ranges and a number of samples; its
            seed is also the seed of the draws within samples.
        document_range: First document to use, and the one after the last.
        num_samples: Length of the dataset; documents repeat as needed.  None: one epoch.
        cache_dir: Directory of the index; None for a directory beside the data.
        name: First part of the cache's file names, such as `train`.

    Attributes:
        rows: Sentence index [samples, 3 or 4], read-only; see `sentence_index`.
        key: Fingerprint of the documents' content, independent of their path.
        order: Fingerprint of documents and order.

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
        sequences = indexed.sequence_range(document_range)
        wanted = request(
            document_range=document_range, sequence_range=sequences, num_samples=num_samples
        )
        self._indexed, self._seed, self._num_samples = indexed, wanted.seed, num_samples
        statistics = sequence_statistics(
            indexed, sequences, record_dir=index_cache_dir(indexed, cache_dir)
        )
        try:
            arrays = load_or_build(
                indexed, wanted, cache_dir=cache_dir, name=name, statistics=statistics
            )
        except NoSampleError as error:
            first, last = document_range
            raise DataError(
                f"the {name} part of `{indexed.prefix}`, {counted(last - first, 'document')}, "
                "makes no sample",
                why=error.why,
                hint=error.hint,
            ) from None
        self.rows: npt.NDArray[np.integer] = arrays["mapping"]
        self._files = MappedFiles(indexed.stored, indexed.index.starts, self.rows)
        self.key = content_fingerprint(indexed, sequences, statistics=statistics)
        settings = [self.key, wanted.seed, wanted.kind, dict(wanted.settings())]
        self.order = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()

    @property
    def available(self) -> int:
        """Number of samples in the index."""
        return len(self.rows)

    def read(self, i: int) -> Any:
        """Return sample *i* of those available, also beyond the number requested."""
        return self[i]

    def __getitem__(self, i: int) -> Any:
        """Return sample *i*; of a subclass."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of samples requested; the index may hold a few more."""
        return len(self.rows) if self._num_samples is None else self._num_samples

    def row(self, i: int) -> list[int]:
        """Return row *i* of the sentence index.

        Raises:
            DataError: A file was cut short since it was opened.
            IndexError: *i* is not the number of a row.
        """
        if not 0 <= i < len(self.rows):
            raise IndexError(f"sample {i} of {len(self.rows)}")
        with self._files.reading(i):
            return [int(value) for value in self.rows[i]]

    def sentences(self, first: int, last: int) -> list[npt.NDArray[np.int64]]:
        """Return the tokens of each sentence from *first* up to, not including, *last*.

        Raises:
            DataError: A file was cut short since it was opened.
        """
        with self._files.reading(f"sentence {first}"):
            return [self._indexed.get(i).astype(np.int64) for i in range(first, last)]

    def random(self, i: int) -> np.random.RandomState:
        """Return a generator seeded for sample *i*, so that each read draws the same numbers."""
        return np.random.RandomState((self._seed + i) % 2**32)

    def check_vocabulary(self, tokens: npt.NDArray[np.int64], size: int) -> None:
        """Raise `DataError` if a token is not in a vocabulary of *size* ids."""
        low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
        if low < 0 or high >= size:
            raise DataError(
                f"`{self._indexed.prefix}` contains token {low if low < 0 else high}; the "
                f"vocabulary has {size} ids",
                why="the dataset was prepared with another tokenizer, or is damaged",
                hint="give the tokenizer of the dataset, or prepare it again",
            )
