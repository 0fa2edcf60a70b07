"""BERT samples: two segments of a document, possibly swapped, with masked words.

Shapes: S sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np
import numpy.typing as npt

from lmcore.data.dataset.masking import MaskingPolicy, MaskingVocabulary, mask_tokens
from lmcore.data.dataset.sentence_dataset import DatasetOptions, SentenceDataset
from lmcore.data.dataset.sentence_index_cache import SegmentRequest
from lmcore.data.indexed.dataset import IndexedDataset

__all__ = ["BertDataset", "BertSample", "BertSettings"]

Int64 = npt.NDArray[np.int64]

_SPECIAL_TOKENS = 3  # one before the first segment, one after each


@dataclass(frozen=True)
class BertSettings:
    """Settings of BERT samples.

    Attributes:
        sequence_length: S, in tokens.
        seed: Seed of the sentence index, and plus a sample's number, of its draws; 0 to
            2**31 - 1.
        binary_head: True for pairs of segments, half of them swapped, for a model with a
            sentence-order head; False for one segment (`--bert-no-binary-head`).
        short_probability: Fraction of shorter samples (`--short-seq-prob`).
        policy: Masking (`--mask-prob` and others).
    """

    sequence_length: int
    seed: int
    binary_head: bool = True
    short_probability: float = 0.1
    policy: MaskingPolicy = field(default_factory=MaskingPolicy)

    def __post_init__(self) -> None:
        if self.sequence_length < _SPECIAL_TOKENS + 2:
            raise ValueError(f"{self.sequence_length=}")

    @property
    def most_predictions(self) -> int:
        """Largest number of masked tokens of a sample; at least 1."""
        text = self.sequence_length - _SPECIAL_TOKENS
        return max(1, int(self.policy.probability * text))


@dataclass(frozen=True)
class BertSample:
    """BERT sample.

    Attributes:
        tokens_S: int64, input token ids; padding is 0.
        types_S: int64, segment ids: 1 in the second segment.
        labels_S: int64, original token at masked positions, -1 elsewhere.
        padding_mask_S: int64, 0 at padding.
        loss_mask_S: int64, 1 at masked positions.
        swapped: True if the second segment comes first in the document (Megatron's `is_random`).
        truncated: True if tokens were cut off.
    """

    tokens_S: Int64
    types_S: Int64
    labels_S: Int64
    padding_mask_S: Int64
    loss_mask_S: Int64
    swapped: bool
    truncated: bool


class BertDataset(SentenceDataset):
    """Samples for BERT, in the order of training.

    Args:
        indexed: Dataset with one sequence per sentence.
        words: Token ids needed for masking.
        settings: Settings of the samples.
        **options: `document_range`, `num_samples` and others of `SentenceDataset`.

    Raises:
        DataError: The documents make no sample; see also `load_or_build`.

    Source:
        Megatron-LM, `megatron/core/datasets/bert_dataset.py`.  Samples are equal if the padding id
        is 0, as BERT's is; Megatron writes another padding id into types and padding mask, too.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        words: MaskingVocabulary,
        settings: BertSettings,
        **options: Unpack[DatasetOptions],
    ) -> None:
        self.words, self.settings = words, settings
        request = functools.partial(
            SegmentRequest,
            longest=settings.sequence_length - _SPECIAL_TOKENS,
            short_probability=settings.short_probability,
            seed=settings.seed,
            least_sentences=2 if settings.binary_head else 1,
        )
        super().__init__(indexed, request, **options)

    def __getitem__(self, i: int) -> BertSample:
        """Return sample *i*.

        Raises:
            IndexError: *i* is not the number of a sample.
            DataError: A token is not in the vocabulary.
        """
        first, last, length = self.row(i)
        sentences = self.sentences(first, last)
        rng = self.random(i)
        pivot, swapped = len(sentences), False
        if self.settings.binary_head:
            pivot = 1 if len(sentences) < 3 else int(rng.randint(1, len(sentences)))
            swapped = bool(rng.random_sample() < 0.5)
        pair = (_joined(sentences[:pivot]), _joined(sentences[pivot:]))
        a, b = pair[::-1] if swapped else pair
        cut_a, cut_b = _truncate(a, b, length, rng)
        tokens, types = self._assemble(cut_a, cut_b)
        self.check_vocabulary(tokens, len(self.words.continues))
        masked, chosen = mask_tokens(tokens, length, self.words, self.settings.policy, rng)
        truncated = len(cut_a) + len(cut_b) < len(a) + len(b)
        return self._padded(tokens, types, masked, chosen, swapped=swapped, truncated=truncated)

    def _assemble(self, a: Int64, b: Int64) -> tuple[Int64, Int64]:
        """Return the segments with special tokens, and the segment id of each token."""
        cls, sep = [self.words.cls], [self.words.sep]
        if not len(b):
            return np.concatenate([cls, a, sep]), np.zeros(len(a) + 2, dtype=np.int64)
        types = np.zeros(len(a) + len(b) + 3, dtype=np.int64)
        types[len(a) + 2 :] = 1
        return np.concatenate([cls, a, sep, b, sep]), types

    def _padded(
        self,
        original: Int64,
        types: Int64,
        masked: Int64,
        chosen: Int64,
        *,
        swapped: bool,
        truncated: bool,
    ) -> BertSample:
        size = self.settings.sequence_length
        tokens_S = np.full(size, self.words.pad, dtype=np.int64)
        types_S, loss_mask_S = np.zeros((2, size), dtype=np.int64)
        labels_S = np.full(size, -1, dtype=np.int64)
        tokens_S[: len(masked)] = masked
        types_S[: len(types)] = types
        labels_S[chosen] = original[chosen]
        loss_mask_S[chosen] = 1
        # A word that was replaced with the padding id counts as padding, as in Megatron.
        padding_mask_S = (tokens_S != self.words.pad).astype(np.int64)
        for tokens in (tokens_S, labels_S):
            tokens[tokens == self.words.pad] = 0
        return BertSample(
            tokens_S, types_S, labels_S, padding_mask_S, loss_mask_S, swapped, truncated
        )


def _joined(sentences: list[Int64]) -> Int64:
    return np.concatenate(sentences) if sentences else np.empty(0, dtype=np.int64)


def _truncate(a: Int64, b: Int64, length: int, rng: np.random.RandomState) -> tuple[Int64, Int64]:
    """Cut single tokens off a random end of the longer segment until both fit *length*."""
    bounds_a, bounds_b = [0, len(a)], [0, len(b)]
    surplus = len(a) + len(b) - length
    if surplus <= 0:
        return a, b
    from_start = (rng.random_sample(surplus) < 0.5).tolist()
    for start in from_start:
        length_a, length_b = bounds_a[1] - bounds_a[0], bounds_b[1] - bounds_b[0]
        bounds = bounds_a if length_a > length_b else bounds_b
        bounds[not start] += 1 if start else -1
    return a[slice(*bounds_a)], b[slice(*bounds_b)]
