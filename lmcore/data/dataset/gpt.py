"""GPT samples: fixed-length windows over a shuffled stream of documents."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.cache.index_cache import default_cache_dir, load_or_build
from lmcore.data.dataset.gpt_index import FINAL_EPOCH_THRESHOLD, IndexRequest
from lmcore.data.dataset.gpt_reader import SampleReader
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.fingerprint import source_key
from lmcore.data.indexed.statistics import sequence_facts

__all__ = ["GPTDataset"]


class GPTDataset:
    """Samples of `sequence_length + 1` tokens, in the order of training.

    Args:
        indexed: Where the tokens are.
        document_range: First document to use, and the one after the last (see `split_ranges`).
        num_samples: Length of the dataset; documents repeat in further epochs as needed.  None:
            as many as one epoch holds.
        sequence_length: Tokens of a sample, without the one that the last token predicts.
        seed: Of the shuffles.
        cache_dir: Where the index is kept; None for a directory beside the data.
        name: First part of the cache's file names, such as `train`.
        final_epoch_threshold: See `build_gpt_index`.

    Attributes:
        key: Tells these documents from others, wherever they lie.

    Raises:
        DataError: See `load_or_build` and `build_gpt_index`.
        ValueError: *num_samples* is None, and the documents do not fill one sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        document_range: tuple[int, int],
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
        name: str = "train",
        final_epoch_threshold: float = FINAL_EPOCH_THRESHOLD,
    ) -> None:
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.name = name
        sequences = indexed.sequence_range(document_range)
        records = Path(cache_dir) if cache_dir is not None else default_cache_dir(indexed)
        facts = sequence_facts(indexed, sequences, record_dir=records)
        if num_samples is None:
            num_samples = (facts.tokens - 1) // sequence_length
        self._num_samples = num_samples
        request = IndexRequest(sequences, num_samples, sequence_length, seed, final_epoch_threshold)
        self.key = source_key(indexed, sequences, facts=facts)
        self._order = _order(self.key, request, facts.tokens)
        arrays = load_or_build(indexed, request, cache_dir=cache_dir, name=name, facts=facts)
        self.index = request.index_of(arrays)
        self._reader = SampleReader(indexed, self.index, sequence_length)

    def __len__(self) -> int:
        """Return the number of samples asked for; the index may hold a few more."""
        return self._num_samples

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        """Return sample *i* of the shuffled order: int64 [sequence_length + 1].

        Raises:
            IndexError: No such sample.
        """
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        return self.read(i)

    @property
    def available(self) -> int:
        """Number of samples that the index holds; at least as many as were asked for."""
        return self.index.samples

    @property
    def order(self) -> str:
        """Fingerprint of documents and order: equal where the samples come in the same order.

        How many samples were asked for does not count, only how many epochs that took.
        """
        return self._order

    def read(self, i: int) -> npt.NDArray[np.int64]:
        """Return sample *i* of those available, also beyond the number asked for."""
        return self._reader.read(int(self.index.shuffle_index[i]))


def _order(key: str, request: IndexRequest, tokens: int) -> str:
    """Return the fingerprint of an order without reading the index."""
    if not tokens or request.num_samples < 1:
        return key  # no index will be built of it
    plan = request.plan(tokens)
    facts = [key, request.sequence_length, request.seed, plan.epochs, plan.last_apart]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
