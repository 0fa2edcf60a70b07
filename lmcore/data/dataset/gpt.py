"""GPT samples: fixed-length windows over a shuffled stream of documents.

They are read in C++ if the extension is built.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError
from lmcore.data import native
from lmcore.data.cache.index_cache import index_cache_dir, load_or_build
from lmcore.data.dataset.gpt_index import FINAL_EPOCH_THRESHOLD, IndexRequest
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.mapped_files import MappedFiles
from lmcore.data.indexed.statistics import content_fingerprint, sequence_statistics

if TYPE_CHECKING:
    from lmcore.data.dataset.gpt_index import GPTIndex
    from lmcore.data.native import NativeReader

__all__ = ["GPTDataset", "SampleReader"]


class GPTDataset:
    """Samples of `sequence_length + 1` tokens, in the order of training.

    Args:
        indexed: The tokens.
        document_range: First document to use, and the one after the last (see `split_ranges`).
        num_samples: Length of the dataset; documents repeat in further epochs as needed.  None:
            as many samples as one epoch holds.
        sequence_length: Tokens of a sample, without the last target.
        seed: Seed of the shuffles.
        cache_dir: Directory of the index; None for a directory beside the data.
        name: First part of the cache's file names, such as `train`.
        final_epoch_threshold: See `build_gpt_index`.

    Attributes:
        key: Fingerprint of the documents' content, independent of their path.
        order: Fingerprint of documents and order: equal if the samples come in the same order.  It
            depends on the number of epochs, not on the number of samples.

    Raises:
        DataError: See `load_or_build` and `build_gpt_index`.
        ValueError: *num_samples* is None, and the documents do not fill one sample.

    Source:
        Megatron-LM, `megatron/core/datasets/gpt_dataset.py`: same samples in the same order.
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
        sequences = indexed.sequence_range(document_range)
        statistics = sequence_statistics(
            indexed, sequences, record_dir=index_cache_dir(indexed, cache_dir)
        )
        if num_samples is None:
            num_samples = (statistics.tokens - 1) // sequence_length
        self._num_samples = num_samples
        request = IndexRequest(sequences, num_samples, sequence_length, seed, final_epoch_threshold)
        self.key = content_fingerprint(indexed, sequences, statistics=statistics)
        self.order = _order(self.key, request, statistics.tokens)
        arrays = load_or_build(
            indexed, request, cache_dir=cache_dir, name=name, statistics=statistics
        )
        self.index = request.index_of(arrays)
        self._reader = SampleReader(indexed, self.index, sequence_length)
        self._files = MappedFiles(
            indexed.stored,
            indexed.index.starts,
            self.index.document_index,
            self.index.sample_index,
            self.index.shuffle_index,
        )

    def __len__(self) -> int:
        """Return the number of samples requested; the index may hold a few more."""
        return self._num_samples

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        """Return sample *i* of the shuffled order: int64 [sequence_length + 1].

        Raises:
            IndexError: *i* is not in 0 to `len(self) - 1`.
        """
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        return self.read(i)

    @property
    def available(self) -> int:
        """Number of samples in the index; at least the number requested."""
        return self.index.samples

    def read(self, i: int) -> npt.NDArray[np.int64]:
        """Return sample *i* of those available, also beyond the number requested.

        Raises:
            DataError: A file was cut short since it was opened.
        """
        with self._files.reading(i):
            return self._reader.read(int(self.index.shuffle_index[i]))

    def documents(self, i: int) -> npt.NDArray[np.int32]:
        """Return the numbers of the sequences that sample *i* has tokens of, int32 [sequences].

        Raises:
            DataError: A file was cut short since it was opened.
        """
        with self._files.reading(i):
            sample = int(self.index.shuffle_index[i])
            first, last = self.index.sample_index[sample : sample + 2, 0].tolist()
            return np.array(self.index.document_index[first : last + 1])


def _order(key: str, request: IndexRequest, tokens: int) -> str:
    """Return the fingerprint of an order without reading the index."""
    if not tokens or request.num_samples < 1:
        return key  # building the index will fail
    plan = request.plan(tokens)
    settings = [key, request.sequence_length, request.seed, plan.epochs, plan.last_apart]
    return hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()


class SampleReader:
    """Samples of `sequence_length + 1` tokens by their number in the sample index.

    Args:
        indexed: The tokens.
        index: Order of the sequences, and the start of each sample in them.
        sequence_length: Tokens that a sample advances.
    """

    def __init__(self, indexed: IndexedDataset, index: GPTIndex, sequence_length: int) -> None:
        self._indexed, self._sequence_length = indexed, sequence_length
        self._documents, self._samples = index.document_index, index.sample_index
        self._native: NativeReader | None = None
        if native.builders is not None:
            self._native = native.builders.SampleReader(
                indexed.stored,
                indexed.index.starts,
                indexed.index.unit,
                indexed.sizes,
                index.document_index,
                index.sample_index,
                sequence_length,
            )

    def read(self, sample: int) -> npt.NDArray[np.int64]:
        """Return a sample's tokens: int64 [sequence_length + 1].

        Args:
            sample: Number of the sample in the sample index.

        Raises:
            DataError: The index does not match the dataset.
        """
        try:
            return self._read(sample) if self._native is None else self._native.read(sample)
        except (ValueError, IndexError) as error:
            raise DataError(
                f"sample {sample} is not within `{self._indexed.prefix}`",
                why="the cached sample index is damaged, or the data changed while it was read",
                hint="delete the directory of cached indices and start again",
            ) from error

    def _read(self, sample: int) -> npt.NDArray[np.int64]:
        if not 0 <= sample < len(self._samples) - 1:
            raise IndexError(f"sample {sample}")
        (first, start), (last, end) = self._samples[sample : sample + 2].tolist()
        tokens = np.empty(self._sequence_length + 1, dtype=np.int64)
        filled = 0
        for position in range(first, last + 1):
            offset = start if position == first else 0
            length = end + 1 - offset if position == last else None
            piece = self._indexed.get(int(self._documents[position]), offset, length)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled != len(tokens):
            raise ValueError(f"{filled} tokens")
        return tokens
