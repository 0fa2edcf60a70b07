"""The three indices that cut a corpus into GPT samples, exactly as Megatron's.

All epochs' documents stand one after another in shuffled order (document index); that stream is
cut every `sequence_length` tokens, a sample taking one token more than it advances (sample
index); the samples are visited in shuffled order (shuffle index).  One `RandomState(seed)` makes
both shuffles, documents first.

A document of the document index is one *sequence* of the indexed dataset, as in Megatron; what
`lmcore data prepare` writes has one sequence a document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lmcore.data import native
from lmcore.data.cache.array_store import Arrays
from lmcore.data.dataset.shuffle import shuffle
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import SequenceFacts
from lmcore.data.native import Counter
from lmcore.errors import DataError

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

# upstream's and Argonne's; BigScience used .95
FINAL_EPOCH_THRESHOLD = 0.80
_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class GPTIndex:
    """The indices of one dataset.

    Attributes:
        document_index: int32 [epochs * documents], a sequence's number in the dataset each.
        sample_index: int32 [samples + 1, 2], where each sample starts: position in the document
            index, and token in that document.
        shuffle_index: uint32 (int64 from 2**32 - 2 samples on) [samples], the order of visits.
    """

    document_index: Int32
    sample_index: Int32
    shuffle_index: npt.NDArray[np.integer]

    @property
    def samples(self) -> int:
        """Number of samples; at least the number asked for."""
        return len(self.shuffle_index)


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents are read.

    Attributes:
        epochs: Passes over all documents.
        before_last: Samples of all passes but the last.
        last_apart: Whether the last pass is shuffled apart from the others.
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
    """Return the epochs that *num_samples* take of documents with *tokens* tokens in all."""
    epochs = -(-(num_samples * sequence_length + 1) // tokens)
    before_last = ((epochs - 1) * tokens - 1) // sequence_length
    wanted_of_last = num_samples - before_last
    apart = epochs > 1 and wanted_of_last < int(
        final_epoch_threshold * ((tokens - 1) // sequence_length)
    )
    return EpochPlan(epochs, before_last, apart)


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
        sizes: Tokens of each sequence of the dataset.
        sequence_range: First sequence to use, and the one after the last.
        sequence_length: Tokens that a sample advances; it has one more.
        num_samples: How many samples are wanted; epochs are added until there are so many.
        seed: Of `numpy.random.RandomState`.
        final_epoch_threshold: The last epoch is shuffled apart from the others if less than this
            part of its samples is wanted.
        progress: counter, raised up to `IndexRequest.work`.

    Raises:
        DataError: No tokens in the range, or an index too large for its type.
    """
    start, end = sequence_range
    if not 0 <= start <= end <= len(sizes) or sequence_length < 1 or num_samples < 1:
        raise ValueError(f"sequences {sequence_range}, length {sequence_length}, {num_samples=}")
    tokens = int(sizes[start:end].sum(dtype=np.int64))
    if not tokens:
        raise DataError(
            f"sequences {start} to {end} of the dataset hold no tokens",
            hint="use more data, or another `--split`",
        )
    planned = plan_epochs(
        tokens,
        num_samples=num_samples,
        sequence_length=sequence_length,
        final_epoch_threshold=final_epoch_threshold,
    )
    epochs, apart = planned.epochs, planned.last_apart
    if epochs * (end - start) > _INT32_MAX:
        raise DataError(
            f"{num_samples} samples take {epochs} epochs of {end - start} documents",
            why=f"the document index counts to {_INT32_MAX}",
            hint="train on more data or for fewer samples",
        )
    rng = np.random.RandomState(seed)
    documents = _document_index(rng, (start, end), planned, progress)
    samples = (epochs * tokens - 1) // sequence_length
    sample_index = build_sample_index(
        sizes,
        documents,
        sequence_length=sequence_length,
        num_samples=samples,
        progress=progress,
    )
    shuffled = _shuffle_index(rng, planned.before_last if apart else samples, samples, progress)
    return GPTIndex(documents, sample_index, shuffled)


@dataclass(frozen=True)
class IndexRequest:
    """Everything that determines a GPT index, besides the sizes of the sequences.

    Attributes:
        sequence_range: first sequence to use, and the one after the last.
        num_samples: number of samples wanted.
        sequence_length: tokens that a sample advances; it has one more.
        seed: seed of the shuffles.
        final_epoch_threshold: see `build_gpt_index`.
        kind: name of the index in messages.
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
        """Return the epochs that the samples take of sequences with *tokens* tokens in all."""
        return plan_epochs(
            tokens,
            num_samples=self.num_samples,
            sequence_length=self.sequence_length,
            final_epoch_threshold=self.final_epoch_threshold,
        )

    def work(self, facts: SequenceFacts) -> int:
        """Return the units of work that `build` counts: documents in two passes, and samples."""
        if not facts.tokens:
            return 0
        epochs = self.plan(facts.tokens).epochs
        samples = (epochs * facts.tokens - 1) // self.sequence_length
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
    """Return where each sample starts in the stream of documents, and where the last one ends.

    Args:
        sizes: Tokens of each sequence of the dataset.
        document_index: The sequences of the stream, in order.
        sequence_length: Tokens from one start to the next.
        num_samples: Number of samples; the stream must hold one token more than they advance.
        progress: Raised by the number of documents.

    Returns:
        int32 [num_samples + 1, 2]: position in *document_index*, and token in that sequence.

    Raises:
        ValueError: An argument out of range, or a stream too short.
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
    """Do what `build_sample_index` does, in numpy: its fallback and its oracle."""
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
    result[0] = 0  # the first sample starts at the first document, be it empty
    return result


def _document_index(
    rng: np.random.RandomState,
    sequence_range: tuple[int, int],
    planned: EpochPlan,
    progress: Counter | None,
) -> Int32:
    index = np.tile(np.arange(*sequence_range, dtype=np.int32), planned.epochs)
    first = len(index) // planned.epochs * (planned.epochs - planned.last_apart)
    for part in (index[:first], index[first:]):
        shuffle(rng, part, progress)  # no draw for none
    return index


def _shuffle_index(
    rng: np.random.RandomState, first: int, total: int, progress: Counter | None
) -> npt.NDArray[np.integer]:
    dtype: type[np.integer] = np.uint32 if total < _UINT32_MAX - 1 else np.int64
    index = np.arange(total, dtype=dtype)
    for part in (index[:first], index[first:]):
        shuffle(rng, part, progress)
    return index
