"""Reader of GPT samples from an indexed dataset, in C++ if the extension is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcore.data import native
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.errors import DataError

if TYPE_CHECKING:
    from lmcore.data.dataset.gpt_index import GPTIndex
    from lmcore.data.native import NativeReader

__all__ = ["SampleReader"]


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
