"""BERT samples: two segments of a document, perhaps in the wrong order, with words masked.

Sample for sample Megatron's where the padding is id 0, as BERT's is; for another id upstream puts
that into types and padding mask, too.  Shapes: S sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np
import numpy.typing as npt

from lmcore.data.dataset.masking import MaskingPolicy, MaskingVocabulary, mask_tokens
from lmcore.data.dataset.sentence_index_cache import SegmentRequest
from lmcore.data.dataset.sentence_samples import SampleChoice, SentenceDataset
from lmcore.data.indexed.dataset import IndexedDataset

__all__ = ["BertDataset", "BertSample", "BertSettings"]

Int64 = npt.NDArray[np.int64]

_SPECIAL_TOKENS = 3  # one before the first segment, one after each


@dataclass(frozen=True)
class BertSettings:
    """How samples are made.

    Attributes:
        sequence_length: S.
        seed: 0 to 2**31 - 1; of the mapping, and with a sample's number added, of its draws.
        binary_head: Make pairs of segments, of which half are swapped, for a model that tells
            them apart; otherwise one segment (`--bert-no-binary-head`).
        short_probability: `--short-seq-prob`.
        policy: `--mask-prob` and the like.
    """

    sequence_length: int
    seed: int
    binary_head: bool = True
    short_probability: float = 0.1
    policy: MaskingPolicy = field(default_factory=MaskingPolicy)

    def __post_init__(self) -> None:
        if self.sequence_length < _SPECIAL_TOKENS + 2:
            raise ValueError(f"{self.sequence_length=}")


@dataclass(frozen=True)
class BertSample:
    """One sample.

    Attributes:
        tokens_S: int64, the input; padding comes out as 0.
        types_S: int64, 1 in the second segment.
        labels_S: int64, the original token where one was chosen, elsewhere -1.
        padding_mask_S: int64, 0 where `tokens_S` is padding.
        loss_mask_S: int64, 1 where a token was chosen.
        swapped: Whether the second segment came first in the document (`is_random` upstream).
        truncated: Whether tokens were left out.
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
        indexed: One sequence a sentence.
        words: Ids that masking needs.
        settings: How samples are made.
        **chosen: `document_range`, `num_samples` and so on, as `SentenceDataset` takes them.

    Raises:
        DataError: The documents make no sample; see also `load_or_build`.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        words: MaskingVocabulary,
        settings: BertSettings,
        **chosen: Unpack[SampleChoice],
    ) -> None:
        self.words, self.settings = words, settings
        request = functools.partial(
            SegmentRequest,
            longest=settings.sequence_length - _SPECIAL_TOKENS,
            short_probability=settings.short_probability,
            seed=settings.seed,
            least_sentences=2 if settings.binary_head else 1,
        )
        super().__init__(indexed, request, **chosen)

    def __getitem__(self, i: int) -> BertSample:
        """Return sample *i*.

        Raises:
            IndexError: No such sample.
            DataError: A token that the vocabulary does not have.
        """
        first, last, length = self.samples.row(i)
        sentences = self.samples.sentences(first, last)
        rng = self.samples.random(i)
        pivot, swapped = len(sentences), False
        if self.settings.binary_head:
            pivot = 1 if len(sentences) < 3 else int(rng.randint(1, len(sentences)))
            swapped = bool(rng.random_sample() < 0.5)
        pair = (_joined(sentences[:pivot]), _joined(sentences[pivot:]))
        a, b = pair[::-1] if swapped else pair
        cut_a, cut_b = _truncate(a, b, length, rng)
        tokens, types = self._assemble(cut_a, cut_b)
        self.samples.check_vocabulary(tokens, len(self.words.continues))
        masked, chosen = mask_tokens(tokens, length, self.words, self.settings.policy, rng)
        truncated = len(cut_a) + len(cut_b) < len(a) + len(b)
        return self._padded(tokens, types, masked, chosen, swapped=swapped, truncated=truncated)

    def _assemble(self, a: Int64, b: Int64) -> tuple[Int64, Int64]:
        """Return the segments between special tokens, and which segment each token is of."""
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
        # A word that was replaced with the padding counts as padding, as upstream.
        padding_mask_S = (tokens_S != self.words.pad).astype(np.int64)
        for tokens in (tokens_S, labels_S):
            tokens[tokens == self.words.pad] = 0
        return BertSample(
            tokens_S, types_S, labels_S, padding_mask_S, loss_mask_S, swapped, truncated
        )


def _joined(sentences: list[Int64]) -> Int64:
    return np.concatenate(sentences) if sentences else np.empty(0, dtype=np.int64)


def _truncate(a: Int64, b: Int64, length: int, rng: np.random.RandomState) -> tuple[Int64, Int64]:
    """Cut the longer segment, one token after another from a random end, until both fit."""
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
