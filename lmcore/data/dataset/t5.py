"""T5 samples: pieces of a text are taken out of the encoder's input, and the decoder gives them.

A sentinel stands in place of each piece, and before the piece in the decoder's text.  Sample for
sample Megatron's.  Shapes: E encoder sequence, D decoder sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np
import numpy.typing as npt

from lmcore.data.dataset.masking import MaskingPolicy, MaskingWords, choose_spans
from lmcore.data.dataset.sentence_index_cache import SegmentRequest
from lmcore.data.dataset.sentence_samples import SampleChoice, SentenceDataset
from lmcore.data.indexed.dataset import IndexedDataset

__all__ = ["T5Dataset", "T5Sample", "T5Settings", "T5Vocabulary", "corrupt_spans"]

Int64 = npt.NDArray[np.int64]

_SPECIAL_TOKENS = 2  # what upstream takes off the encoder's length


@dataclass(frozen=True)
class T5Vocabulary:
    """What span corruption asks of a vocabulary.

    Attributes:
        words: Which tokens are never taken, and which continue a word.
        bos: Id that begins the decoder's input.
        eos: Id that ends the decoder's output.
        pad: Id of the padding; it comes out as 0.
        sentinels: Ids that stand for pieces, in the order of use (`--vocab-extra-ids`).
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
    """How samples are made.

    Attributes:
        encoder_length: E.
        decoder_length: D.
        seed: 0 to 2**31 - 1; of the mapping, and with a sample's number added, of its draws.
        short_probability: `--short-seq-prob`.
        policy: How much is taken out; pieces of geometric length up to ten words.
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
    """One sample.

    Attributes:
        encoder_tokens_E: int64, the text with sentinels for what was taken.
        decoder_tokens_D: int64, the decoder's input.
        labels_D: int64, the decoder's output; -1 beyond its end.
        loss_mask_D: int64, 1 up to the output's end.
        encoder_mask_E: int64, 0 at padding.
        decoder_mask_D: int64, 0 at padding.
        truncated: Whether tokens were left out.
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
        indexed: One sequence a sentence.
        vocabulary: Ids that span corruption needs.
        settings: How samples are made.
        **chosen: `document_range`, `num_samples` and so on, as `SentenceDataset` takes them.

    Raises:
        DataError: The documents make no sample; see also `load_or_build`.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        vocabulary: T5Vocabulary,
        settings: T5Settings,
        **chosen: Unpack[SampleChoice],
    ) -> None:
        self.vocabulary, self.settings = vocabulary, settings
        request = functools.partial(
            SegmentRequest,
            longest=settings.encoder_length - _SPECIAL_TOKENS,
            short_probability=settings.short_probability,
            seed=settings.seed,
            least_sentences=1,
        )
        super().__init__(indexed, request, **chosen)

    def __getitem__(self, i: int) -> T5Sample:
        """Return sample *i*.

        Raises:
            IndexError: No such sample.
            DataError: A token that the vocabulary does not have.
        """
        first, last, length = self.samples.row(i)
        tokens = np.concatenate(self.samples.sentences(first, last))
        self.samples.check_vocabulary(tokens, len(self.vocabulary.words.continues))
        encoder, decoder = corrupt_spans(
            tokens[:length],
            length,
            self.vocabulary,
            self.settings.policy,
            self.samples.random(i),
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
    """Return the text with sentinels for the pieces taken out, and the pieces after theirs.

    Where upstream stops the run, as sentinels or places in the decoder run out, no further piece is
    taken here.

    Args:
        tokens: int64 [length].
        target_length: Length that the sample was to have; bounds how much is taken out.
        vocabulary: The ids.
        policy: How much, and in what pieces.
        rng: Advanced.
        decoder_length: Most that pieces, sentinels and one more token may take.
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
