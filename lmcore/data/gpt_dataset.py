"""GPT samples: fixed-length windows over a shuffled stream of documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.gpt_index import FINAL_EPOCH_THRESHOLD
from lmcore.data.index_cache import IndexRequest, load_or_build
from lmcore.data.indexed import IndexedDataset

__all__ = ["GPTDataset"]


class GPTDataset:
    """Samples of `sequence_length + 1` tokens, in the order of training.

    Args:
        indexed: Where the tokens are.
        document_range: First document to use, and the one after the last (see `split_ranges`).
        num_samples: Length of the dataset; documents repeat in further epochs as needed.
        sequence_length: Tokens of a sample, without the one that the last token predicts.
        seed: Of the shuffles.
        cache_dir: Where the index is kept; None for a directory beside the data.
        name: First part of the cache's file names, such as `train`.
        final_epoch_threshold: See `build_gpt_index`.
        build: Whether this process may build the index; otherwise it waits for one that does.

    Raises:
        DataError: See `load_or_build` and `build_gpt_index`.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        document_range: tuple[int, int],
        num_samples: int,
        sequence_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
        name: str = "train",
        final_epoch_threshold: float = FINAL_EPOCH_THRESHOLD,
        build: bool = True,
    ) -> None:
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.name = name
        self._num_samples = num_samples
        first, last = (int(indexed.document_indices[bound]) for bound in document_range)
        request = IndexRequest(
            (first, last), num_samples, sequence_length, seed, final_epoch_threshold
        )
        self.index = load_or_build(indexed, request, cache_dir=cache_dir, name=name, build=build)

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
        sample_index, documents = self.index.sample_index, self.index.document_index
        at = int(self.index.shuffle_index[i])
        (first, start), (last, end) = sample_index[at].tolist(), sample_index[at + 1].tolist()
        tokens = np.empty(self.sequence_length + 1, dtype=np.int64)
        filled = 0
        for position in range(first, last + 1):
            offset = start if position == first else 0
            length = end + 1 - offset if position == last else None
            piece = self.indexed.get(int(documents[position]), offset, length)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
        return tokens
