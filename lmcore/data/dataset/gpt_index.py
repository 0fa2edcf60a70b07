"""GPT sample index: the three arrays that cut a corpus into samples, equal to Megatron's.

The document index is the shuffled order of the documents of all epochs.  The sample index cuts
this stream every `sequence_length` tokens; a sample has one token more than it advances.  The
shuffle index is the order in which samples are visited.  One `RandomState(seed)` makes both
shuffles, documents first.

A document of the document index is one *sequence* of the indexed dataset, as in Megatron; datasets
of `lmcore data prepare` have one sequence per document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError, host_memory
from lmcore.data import native
from lmcore.data.cache.array_store import Arrays
from lmcore.data.dataset.shuffle import shuffle
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import SequenceStatistics
from lmcore.data.native import Counter

__all__ = [
    "FINAL_EPOCH_THRESHOLD",
    "EpochPlan",
    "GPTIndex",
    "IndexRequest",
    "build_gpt_index",
    "build_sample_index",
    "build_sample_index_python",
    "plan_epochs",
]

# Megatron's and Argonne's value; BigScience used 0.95.
FINAL_EPOCH_THRESHOLD = 0.80
_INT32_MAX = 2**31 - 1
_FEWER = (
    "fewer samples: training takes the global batch size in each step, a validation `--eval-iters` "
    "times the global batch size"
)
_UINT32_MAX = 2**32 - 1

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class GPTIndex:
    """Indices of one dataset.

    Attributes:
        document_index: int32 [epochs * documents], number of a sequence in the dataset.
        sample_index: int32 [samples + 1, 2], start of each sample: position in the document
            index, and token in that document.
        shuffle_index: uint32 (int64 from 2**32 - 2 samples on) [samples], order of the samples.
    """

    document_index: Int32
    sample_index: Int32
    shuffle_index: npt.NDArray[np.integer]

    @property
    def samples(self) -> int:
        """Number of samples; at least the number requested."""
        return len(self.shuffle_index)


@dataclass(frozen=True)
class EpochPlan:
    """Number of epochs over the documents.

    Attributes:
        epochs: Passes over all documents.
        before_last: Number of samples in all passes but the last.
        last_apart: True if the last pass is shuffled separately from earlier passes.
    """

    epochs: int
    before_last: int
    last_apart: bool


def plan_epochs(
    tokens: int,
    *,
    num_samples: int,
    sequence_length: int,
    final_epoch_threshold: float = FINAL_EPOCH_THRESHOLD,
) -> EpochPlan:
    """Return the epochs needed for a number of samples.

    Args:
        tokens: Number of tokens in one epoch, at least 1.
        num_samples: Number of samples wanted.
        sequence_length: Tokens that a sample advances.
        final_epoch_threshold: See `build_gpt_index`.

    Source:
        Megatron-LM, `GPTDataset._build_document_sample_shuffle_indices`.
    """
    epochs = -(-(num_samples * sequence_length + 1) // tokens)
    before_last = ((epochs - 1) * tokens - 1) // sequence_length
    wanted_of_last = num_samples - before_last
    threshold = int(final_epoch_threshold * ((tokens - 1) // sequence_length))
    return EpochPlan(epochs, before_last, epochs > 1 and wanted_of_last < threshold)


def build_gpt_index(
    sizes: npt.NDArray[np.int32],
    sequence_range: tuple[int, int],
    *,
    sequence_length: int,
    num_samples: int,
    seed: int,
    final_epoch_threshold: float = FINAL_EPOCH_THRESHOLD,
    progress: Counter | None = None,
) -> GPTIndex:
    """Build the indices for at least *num_samples* samples.

    Args:
        sizes: int32 [sequences], tokens of each sequence of the dataset.
        sequence_range: First sequence to use, and the one after the last.
        sequence_length: Tokens that a sample advances; it has one more.
        num_samples: Number of samples wanted; epochs are added until they hold as many.
        seed: Seed of `numpy.random.RandomState`.
        final_epoch_threshold: The last epoch is shuffled separately if less than this fraction of
            its samples is wanted.
        progress: Counter of finished units of work, raised to `IndexRequest.work`.

    Raises:
        DataError: The range has no tokens, or an index is too large for its type or the host.

    Source:
        Megatron-LM, `GPTDataset._build_document_sample_shuffle_indices`.
    """
    start, end = sequence_range
    if not 0 <= start <= end <= len(sizes) or sequence_length < 1 or num_samples < 1:
        raise ValueError(f"sequences {sequence_range}, length {sequence_length}, {num_samples=}")
    tokens = int(sizes[start:end].sum(dtype=np.int64))
    if not tokens:
        raise DataError(
            f"sequences {start} to {end} of the dataset contain no tokens",
            hint="use more data, or another `--split`",
        )
    plan = plan_epochs(
        tokens,
        num_samples=num_samples,
        sequence_length=sequence_length,
        final_epoch_threshold=final_epoch_threshold,
    )
    if plan.epochs * (end - start) > _INT32_MAX:
        raise DataError(
            f"{num_samples} samples need {plan.epochs} epochs of {end - start} documents",
            why=f"the document index has at most {_INT32_MAX} entries",
            hint=f"use more data, or {_FEWER}",
        )
    samples = (plan.epochs * tokens - 1) // sequence_length
    dtype: type[np.integer] = np.uint32 if samples < _UINT32_MAX - 1 else np.int64
    size = 4 * plan.epochs * (end - start) + (8 + np.dtype(dtype).itemsize) * samples
    memory = host_memory()
    if size > memory:  # found now, not after hours of shuffling
        raise DataError(
            f"{num_samples} samples need an index of {size / 2**30:.0f} GiB",
            why=f"this host has {memory / 2**30:.0f} GiB of memory; the samples are "
            f"{plan.epochs} epochs of {end - start} documents",
            hint=f"use {_FEWER}",
        )
    rng = np.random.RandomState(seed)
    documents = np.tile(np.arange(start, end, dtype=np.int32), plan.epochs)
    together = (end - start) * (plan.epochs - plan.last_apart)
    shuffle(rng, documents[:together], progress)
    shuffle(rng, documents[together:], progress)  # an empty part draws no number
    sample_index = build_sample_index(
        sizes,
        documents,
        sequence_length=sequence_length,
        num_samples=samples,
        progress=progress,
    )
    order = np.arange(samples, dtype=dtype)
    together = plan.before_last if plan.last_apart else samples
    shuffle(rng, order[:together], progress)
    shuffle(rng, order[together:], progress)
    return GPTIndex(documents, sample_index, order)


@dataclass(frozen=True)
class IndexRequest:
    """Everything that determines a GPT index, besides the sizes of the sequences.

    Attributes:
        sequence_range: First sequence to use, and the one after the last.
        num_samples: Number of samples wanted.
        sequence_length: Tokens that a sample advances; it has one more.
        seed: Seed of the shuffles.
        final_epoch_threshold: See `build_gpt_index`.
        kind: Name of the index in messages.
    """

    sequence_range: tuple[int, int]
    num_samples: int
    sequence_length: int
    seed: int
    final_epoch_threshold: float = FINAL_EPOCH_THRESHOLD
    kind: ClassVar[str] = "sample index"

    def settings(self) -> Mapping[str, object]:
        """Return all fields, for the cache's key."""
        return asdict(self)

    def plan(self, tokens: int) -> EpochPlan:
        """Return the epochs needed for the samples, if an epoch has *tokens* tokens."""
        return plan_epochs(
            tokens,
            num_samples=self.num_samples,
            sequence_length=self.sequence_length,
            final_epoch_threshold=self.final_epoch_threshold,
        )

    def work(self, statistics: SequenceStatistics) -> int:
        """Return the units of work that `build` counts: documents in two passes, and samples."""
        if not statistics.tokens:
            return 0
        epochs = self.plan(statistics.tokens).epochs
        samples = (epochs * statistics.tokens - 1) // self.sequence_length
        return 2 * epochs * (self.sequence_range[1] - self.sequence_range[0]) + samples

    def build(self, indexed: IndexedDataset, progress: Counter) -> Arrays:
        """Build the arrays of a `GPTIndex`, by the names of its attributes."""
        index = build_gpt_index(
            indexed.sizes,
            self.sequence_range,
            sequence_length=self.sequence_length,
            num_samples=self.num_samples,
            seed=self.seed,
            final_epoch_threshold=self.final_epoch_threshold,
            progress=progress,
        )
        return dict(vars(index))

    @staticmethod
    def index_of(arrays: Arrays) -> GPTIndex:
        """Return the arrays that `build` made, or that the cache holds, as a `GPTIndex`."""
        return GPTIndex(
            arrays["document_index"].view(np.int32),
            arrays["sample_index"].view(np.int32),
            arrays["shuffle_index"],
        )


def build_sample_index(
    sizes: npt.NDArray[np.int32],
    document_index: Int32,
    *,
    sequence_length: int,
    num_samples: int,
    progress: Counter | None = None,
) -> Int32:
    """Return the start of each sample in the stream of documents, and the end of the last one.

    Args:
        sizes: int32 [sequences], tokens of each sequence of the dataset.
        document_index: int32 [documents], the sequences of the stream, in order.
        sequence_length: Tokens from one start to the next.
        num_samples: Number of samples; the stream must hold one token more than they advance.
        progress: Counter of finished units of work, raised by the number of documents.

    Returns:
        int32 [num_samples + 1, 2]: position in *document_index*, and token in that sequence.

    Raises:
        ValueError: An argument is out of range, or the stream is too short.

    Source:
        Megatron-LM, `build_sample_idx` in `megatron/core/datasets/helpers.cpp`.
    """
    if native.builders is not None:
        return native.builders.build_sample_index(
            sizes, document_index, sequence_length, num_samples, native.threads(), progress
        )
    index = build_sample_index_python(
        sizes, document_index, sequence_length=sequence_length, num_samples=num_samples
    )
    if progress is not None:
        progress += len(document_index)
    return index


def build_sample_index_python(
    sizes: npt.NDArray[np.int32], document_index: Int32, *, sequence_length: int, num_samples: int
) -> Int32:
    """Build the same array as `build_sample_index` in numpy: its fallback and its oracle."""
    if sequence_length < 1 or num_samples < 0:
        raise ValueError(f"sequence length {sequence_length}, {num_samples} samples")
    if len(document_index) and not (
        int(document_index.min()) >= 0 and int(document_index.max()) < len(sizes)
    ):
        raise ValueError("the document index names a sequence that the dataset does not have")
    lengths = sizes[document_index]
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError("a sequence has a negative size")
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if num_samples * sequence_length >= max(total, 1):
        raise ValueError(
            f"{total} tokens do not make {num_samples} samples of {sequence_length} tokens"
        )
    starts = np.arange(num_samples + 1, dtype=np.int64) * sequence_length
    position = np.searchsorted(ends, starts, side="right")
    result = np.empty((num_samples + 1, 2), dtype=np.int32)
    result[:, 0] = position
    if total:
        result[:, 1] = starts - (ends - lengths)[position]
    result[0] = 0  # the first sample starts at the first document, even if that is empty
    return result
