"""T5 samples by span corruption: spans removed from the encoder's input are the decoder's target.

A sentinel token replaces each span in the input, and precedes the span in the decoder's text.
Shapes: E encoder sequence, D decoder sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np
import numpy.typing as npt

from lmcore.data.dataset.masking import MaskingPolicy, MaskingWords, choose_spans
from lmcore.data.dataset.sentence_dataset import DatasetOptions, SentenceDataset
from lmcore.data.dataset.sentence_index_cache import SegmentRequest
from lmcore.data.indexed.dataset import IndexedDataset

__all__ = ["T5Dataset", "T5Sample", "T5Settings", "T5Vocabulary", "corrupt_spans"]

Int64 = npt.NDArray[np.int64]

_SPECIAL_TOKENS = 2  # that Megatron subtracts from the encoder's length


@dataclass(frozen=True)
class T5Vocabulary:
    """Token ids needed for span corruption.

    Attributes:
        words: Special tokens, and tokens that continue a word.
        bos: Id that begins the decoder's input.
        eos: Id that ends the decoder's output.
        pad: Id of the padding; samples have 0 instead.
        sentinels: Ids that replace spans, in the order of use (`--vocab-extra-ids`).
    """

    words: MaskingWords
    bos: int
    eos: int
    pad: int
    sentinels: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sentinels:
            raise ValueError("T5 needs sentinels")


@dataclass(frozen=True)
class T5Settings:
    """Settings of T5 samples.

    Attributes:
        encoder_length: E, in tokens.
        decoder_length: D, in tokens.
        seed: Seed of the sentence index, and plus a sample's number, of its draws; 0 to
            2**31 - 1.
        short_probability: Fraction of shorter samples (`--short-seq-prob`).
        policy: Fraction of tokens to remove; span lengths are geometric, up to ten words.
    """

    encoder_length: int
    decoder_length: int
    seed: int
    short_probability: float = 0.1
    policy: MaskingPolicy = field(
        default_factory=lambda: MaskingPolicy(max_ngram=10, geometric=True)
    )

    def __post_init__(self) -> None:
        if self.encoder_length < _SPECIAL_TOKENS + 2 or self.decoder_length < 3:
            raise ValueError(f"{self.encoder_length=}, {self.decoder_length=}")


@dataclass(frozen=True)
class T5Sample:
    """T5 sample.

    Attributes:
        encoder_tokens_E: int64, text with sentinels in place of the removed spans.
        decoder_tokens_D: int64, input of the decoder.
        labels_D: int64, target of the decoder; -1 beyond its end.
        loss_mask_D: int64, 1 up to the end of the target.
        encoder_mask_E: int64, 0 at padding.
        decoder_mask_D: int64, 0 at padding.
        truncated: True if tokens were cut off.
    """

    encoder_tokens_E: Int64
    decoder_tokens_D: Int64
    labels_D: Int64
    loss_mask_D: Int64
    encoder_mask_E: Int64
    decoder_mask_D: Int64
    truncated: bool


class T5Dataset(SentenceDataset):
    """Samples for T5, in the order of training.

    Args:
        indexed: Dataset with one sequence per sentence.
        vocabulary: Token ids needed for span corruption.
        settings: Settings of the samples.
        **options: `document_range`, `num_samples` and others of `SentenceDataset`.

    Raises:
        DataError: The documents make no sample; see also `load_or_build`.

    Source:
        Megatron-LM, `megatron/core/datasets/t5_dataset.py`: the same samples.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        vocabulary: T5Vocabulary,
        settings: T5Settings,
        **options: Unpack[DatasetOptions],
    ) -> None:
        self.vocabulary, self.settings = vocabulary, settings
        request = functools.partial(
            SegmentRequest,
            longest=settings.encoder_length - _SPECIAL_TOKENS,
            short_probability=settings.short_probability,
            seed=settings.seed,
            least_sentences=1,
        )
        super().__init__(indexed, request, **options)

    def __getitem__(self, i: int) -> T5Sample:
        """Return sample *i*.

        Raises:
            IndexError: *i* is not the number of a sample.
            DataError: A token is not in the vocabulary.
        """
        first, last, length = self.row(i)
        tokens = np.concatenate(self.sentences(first, last))
        self.check_vocabulary(tokens, len(self.vocabulary.words.continues))
        encoder, decoder = corrupt_spans(
            tokens[:length],
            length,
            self.vocabulary,
            self.settings.policy,
            self.random(i),
            decoder_length=self.settings.decoder_length,
        )
        return self._padded(encoder, decoder, truncated=len(tokens) > length)

    def _padded(self, encoder: list[int], decoder: list[int], *, truncated: bool) -> T5Sample:
        pad, size = self.vocabulary.pad, self.settings.decoder_length
        encoder_tokens_E = np.full(self.settings.encoder_length, pad, dtype=np.int64)
        encoder_tokens_E[: len(encoder)] = encoder
        decoder_tokens_D = np.full(size, pad, dtype=np.int64)
        decoder_tokens_D[: len(decoder) + 1] = [self.vocabulary.bos, *decoder]
        labels_D = np.full(size, -1, dtype=np.int64)
        labels_D[: len(decoder) + 1] = [*decoder, self.vocabulary.eos]
        loss_mask_D = np.zeros(size, dtype=np.int64)
        loss_mask_D[: len(decoder) + 1] = 1
        encoder_mask_E = (encoder_tokens_E != pad).astype(np.int64)
        decoder_mask_D = (decoder_tokens_D != pad).astype(np.int64)
        for tokens in (encoder_tokens_E, decoder_tokens_D, labels_D):
            tokens[tokens == pad] = 0
        return T5Sample(
            encoder_tokens_E,
            decoder_tokens_D,
            labels_D,
            loss_mask_D,
            encoder_mask_E,
            decoder_mask_D,
            truncated,
        )


def corrupt_spans(
    tokens: Int64,
    target_length: int,
    vocabulary: T5Vocabulary,
    policy: MaskingPolicy,
    rng: np.random.RandomState,
    *,
    decoder_length: int,
) -> tuple[list[int], list[int]]:
    """Return the encoder's text, with sentinels for the removed spans, and the decoder's text.

    Args:
        tokens: int64 [length], the text.
        target_length: Intended length of the sample, in tokens; limits the tokens removed.
        vocabulary: Token ids.
        policy: Number and length of the spans.
        rng: Generator, advanced in place.
        decoder_length: Maximum of spans, sentinels and one further token together, in tokens.

    Source:
        Raffel et al. 2020 (https://arxiv.org/abs/1910.10683), section 3.1.4, and Megatron-LM.  If
        sentinels or the decoder's length run out, Megatron stops the run; here no further span is
        removed.
    """
    chosen = choose_spans(
        tokens,
        target_length,
        vocabulary.words,
        policy,
        rng,
        most_spans=len(vocabulary.sentinels),
        most_spans_and_tokens=decoder_length - 1,
    )
    spans = sorted(positions for positions, _ in chosen)
    encoder: list[int] = []
    decoder: list[int] = []
    start = 0
    for sentinel, positions in zip(vocabulary.sentinels, spans, strict=False):
        encoder += [*tokens[start : positions[0]].tolist(), sentinel]
        decoder += [sentinel, *tokens[positions].tolist()]
        start = positions[-1] + 1
    return encoder + tokens[start:].tolist(), decoder
