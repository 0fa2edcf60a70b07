"""Sentence index: the sentences of each BERT or T5 sample, or of each ICT block.

A document is several sequences, one per sentence, as `lmcore data prepare --split-sentences`
writes them.  Consecutive sentences of a document are joined until they have enough tokens.  Epochs
are added until there are enough samples; all samples are shuffled together.  Rows and their order
are equal to Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError
from lmcore.data import native
from lmcore.data.native import Counter

__all__ = [
    "NoSampleError",
    "build_block_mapping",
    "build_block_mapping_python",
    "build_segment_mapping",
    "build_segment_mapping_python",
]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.unsignedinteger]

_LONGEST_SENTENCE = 512
"""Tokens of the longest sentence; a document with a longer one is skipped, unless it is the only
one."""
_INT32_MAX = 2**31 - 1
_NO_LIMIT = 2**63 - 1


class NoSampleError(DataError):
    """Documents that make no sample."""


def build_segment_mapping(
    documents: Int64,
    sizes: Int32,
    *,
    num_samples: int | None,
    longest: int,
    short_probability: float,
    seed: int,
    least_sentences: int,
    progress: Counter | None = None,
) -> Rows:
    """Return the sentences of each BERT or T5 sample.

    Args:
        documents: int64 [documents + 1], first sequence of each document, and end of the last.
        sizes: int32 [sequences], tokens of each sequence of the dataset.
        num_samples: Number of samples wanted; epochs are added as needed.  None: one epoch.
        longest: Tokens of a sample, without special tokens.
        short_probability: Fraction of samples of a random length, from 2 tokens on.
        seed: Seed of lengths and shuffle, 0 to 2**31 - 1.
        least_sentences: Minimum sentences of a sample: 2 for pairs of segments, otherwise 1.
        progress: Counter of finished units of work, raised by each epoch's samples.

    Returns:
        uint32 (uint64 for more than 2**32 - 1 sequences) [samples, 3]: first sentence, the one
        after the last, and the tokens that the sample is cut to.

    Raises:
        NoSampleError: The documents make no sample.
        ValueError: An argument is out of range.

    Source:
        Megatron-LM, `build_mapping` in `megatron/core/datasets/helpers.cpp`.
    """
    if not 0 <= short_probability <= 1 or least_sentences < 1:
        raise ValueError(f"{short_probability=}, {least_sentences=}")
    ratio = _short_ratio(short_probability)
    epochs, wanted = _epochs(num_samples, longest, seed)
    build = (
        build_segment_mapping_python
        if native.builders is None
        else native.builders.build_segment_mapping
    )
    rows = build(documents, sizes, epochs, wanted, longest, ratio, seed, least_sentences, progress)
    return _checked_rows(rows, num_samples, least_sentences)


def build_block_mapping(
    documents: Int64,
    sizes: Int32,
    title_sizes: Int32,
    *,
    num_samples: int | None,
    longest: int,
    seed: int,
    one_sentence: bool = False,
    progress: Counter | None = None,
) -> Rows:
    """Return the sentences of each block, its document and its number.

    Args:
        documents: int64 [documents + 1], first sequence of each document, and end of the last.
        sizes: int32 [sequences], tokens of each sequence of the dataset.
        title_sizes: int32 [documents], tokens of each document's title.
        num_samples: Number of samples wanted; epochs are added as needed.  None: one epoch, each
            block once.
        longest: Tokens of a block and its title.
        seed: Seed of the shuffle, 0 to 2**31 - 1.
        one_sentence: True to include documents (and blocks) of a single sentence.
        progress: Counter of finished units of work, raised by each epoch's blocks.

    Returns:
        uint32 (uint64 for more than 2**32 - 1 sequences) [samples, 4]: first sentence, the one
        after the last, document (counted from the first of *documents*), and the block's number,
        which is the same in each epoch.

    Raises:
        NoSampleError: The documents make no block.
        ValueError: An argument is out of range.

    Source:
        Megatron-LM, `build_blocks_mapping` in `megatron/core/datasets/helpers.cpp`.
    """
    epochs, wanted = _epochs(num_samples, longest, seed)
    build = (
        build_block_mapping_python
        if native.builders is None
        else native.builders.build_block_mapping
    )
    rows = build(
        documents, sizes, title_sizes, epochs, wanted, longest, seed, one_sentence, progress
    )
    return _checked_rows(rows, num_samples, 1 if one_sentence else 2)


def build_segment_mapping_python(
    documents: Int64,
    sizes: Int32,
    num_epochs: int,
    num_samples: int,
    longest: int,
    short_ratio: int,
    seed: int,
    least_sentences: int,
    progress: Counter | None = None,
) -> Rows:
    """Build the same rows as the C++ of `build_segment_mapping`: its fallback and its oracle."""
    _check_documents(documents, sizes)
    numbers = _random_32(seed)

    def target_length() -> int:
        if short_ratio == 0:
            return longest
        number = next(numbers)
        return 2 + number % (longest - 1) if number % short_ratio == 0 else longest

    def map_document(document: int, _: int, rows: list[tuple[int, ...]]) -> None:
        first, last = int(documents[document]), int(documents[document + 1])
        lengths = sizes[first:last].tolist()
        if last - first < least_sentences:
            return
        if last - first > 1 and max(lengths) > _LONGEST_SENTENCE:
            return
        start, tokens, target = first, 0, target_length()
        for sentence, length in enumerate(lengths, first):
            tokens += length
            left = last - sentence - 1
            full = tokens >= target and left > 1 and sentence + 1 - start >= least_sentences
            if full or left == 0:
                rows.append((start, sentence + 1, target))
                start, tokens, target = sentence + 1, 0, target_length()

    rows = _map_epochs(len(documents) - 1, num_epochs, num_samples, map_document, progress)
    return _shuffled(rows, 3, seed + 1, len(sizes))


def build_block_mapping_python(
    documents: Int64,
    sizes: Int32,
    title_sizes: Int32,
    num_epochs: int,
    num_samples: int,
    longest: int,
    seed: int,
    one_sentence: bool,  # noqa: FBT001  # as in C++
    progress: Counter | None = None,
) -> Rows:
    """Build the same rows as the C++ of `build_block_mapping`: its fallback and its oracle."""
    _check_documents(documents, sizes)
    if len(title_sizes) != len(documents) - 1:
        raise ValueError("there must be one title per document")
    least = 1 if one_sentence else 2

    def map_document(document: int, before: int, rows: list[tuple[int, ...]]) -> None:
        first, last = int(documents[document]), int(documents[document + 1])
        lengths = sizes[first:last].tolist()
        if last - first < least or max(lengths) > _LONGEST_SENTENCE:
            return
        start, tokens, target = first, 0, longest - int(title_sizes[document])
        for sentence, length in enumerate(lengths, first):
            tokens += length
            left = last - sentence - 1
            if (tokens >= target and left >= least and sentence + 1 - start >= least) or left == 0:
                rows.append((start, sentence + 1, document, len(rows) - before))
                start, tokens = sentence + 1, 0

    rows = _map_epochs(len(documents) - 1, num_epochs, num_samples, map_document, progress)
    return _shuffled(rows, 4, seed + 1, len(sizes))


def _short_ratio(probability: float) -> int:
    """Return n such that one of n samples is short; 0 for none."""
    if probability == 0:
        return 0
    ratio = math.floor(1 / probability + 0.5)  # as C rounds; Python rounds halves to even
    if ratio > _INT32_MAX:
        raise ValueError(f"a probability of {probability}")
    return ratio


def _epochs(num_samples: int | None, longest: int, seed: int) -> tuple[int, int]:
    if not 2 <= longest <= _INT32_MAX or not 0 <= seed <= _INT32_MAX:
        raise ValueError(f"{longest=}, {seed=}")
    if num_samples is None:
        return 1, _NO_LIMIT
    if num_samples < 1:
        raise ValueError(f"{num_samples=}")
    return _INT32_MAX - 1, num_samples


def _checked_rows(rows: Rows, num_samples: int | None, least_sentences: int) -> Rows:
    if not len(rows) or (num_samples is not None and len(rows) < num_samples):
        raise NoSampleError(
            "the documents make no sample",
            why=f"no document has {least_sentences} or more sentences of at most "
            f"{_LONGEST_SENTENCE} tokens each",
            hint="prepare the data with `--split-sentences`, or give this part a larger share of "
            "`--split`",
        )
    return rows


def _check_documents(documents: Int64, sizes: Int32) -> None:
    if not len(documents):
        raise ValueError("documents is empty")
    bounds = np.asarray(documents)
    if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > len(sizes):
        raise ValueError("documents does not rise within the sentences")


def _map_epochs(
    num_documents: int,
    num_epochs: int,
    num_samples: int,
    map_document: Callable[[int, int, list[tuple[int, ...]]], None],
    progress: Counter | None,
) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for _ in range(num_epochs):
        before = len(rows)
        if before >= num_samples:
            break
        for document in range(num_documents):
            map_document(document, before, rows)
        if len(rows) == before:
            break
        if progress is not None:
            progress += len(rows) - before
    return rows


def _shuffled(rows: list[tuple[int, ...]], width: int, seed: int, num_sequences: int) -> Rows:
    numbers = _random_64(seed)
    for i in range(len(rows) - 1, 0, -1):
        j = next(numbers) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    dtype: type[np.unsignedinteger] = np.uint64 if num_sequences > 2**32 - 1 else np.uint32
    return np.array(rows, dtype=dtype).reshape(len(rows), width)


def _random_32(seed: int) -> Iterator[int]:
    """Yield the numbers of `std::mt19937`, the generator of numpy's `RandomState`."""
    rng = np.random.RandomState(seed)
    while True:
        yield from rng.randint(0, 2**32, size=1024, dtype=np.uint32).tolist()


def _random_64(seed: int) -> Iterator[int]:
    """Yield the numbers of `std::mt19937_64` (Nishimura 2000, and the C++ standard)."""
    full, size, shift = 2**64 - 1, 312, 156
    state = [seed & full]
    for i in range(1, size):
        before = state[-1]
        state.append((6364136223846793005 * (before ^ (before >> 62)) + i) & full)
    while True:
        for i in range(size):
            joined = (state[i] & 0xFFFFFFFF80000000) | (state[(i + 1) % size] & 0x7FFFFFFF)
            mixed = (joined >> 1) ^ (0xB5026F5AA96619E9 if joined & 1 else 0)
            state[i] = state[(i + shift) % size] ^ mixed
        for value in state:
            value ^= (value >> 29) & 0x5555555555555555  # noqa: PLW2901  # tempering, in steps
            value ^= (value << 17) & 0x71D67FFFEDA60000  # noqa: PLW2901
            value ^= (value << 37) & 0xFFF7EEE000000000  # noqa: PLW2901
            yield value ^ (value >> 43)
