"""Chooses the words of a sample that a model is to restore: BERT's masked words, T5's spans.

Whole words are taken in random order, each with up to some words after it, until a part of the
tokens is chosen.  All draws come from one `RandomState` in the order of Megatron's, so that the
same seed chooses the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcore.data.dataset.shuffle import shuffle

__all__ = ["MaskingPolicy", "MaskingVocabulary", "MaskingWords", "choose_spans", "mask_tokens"]

_GEOMETRIC_P = 0.2  # SpanBERT, section 3.1 (https://arxiv.org/abs/1907.10529)

Replace = Callable[[np.random.RandomState], int | None]


@dataclass(frozen=True)
class MaskingWords:
    """What masking asks of a vocabulary.

    Attributes:
        cls: Id that begins a sample; never masked.
        sep: Id that ends a segment; never masked.
        continues: bool [vocabulary], whether a token continues the word before it, as `##ing`
            does; all False where tokens are words by themselves.
    """

    cls: int
    sep: int
    continues: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        if self.continues.ndim != 1 or self.continues.dtype != np.bool_:
            raise ValueError("`continues` is one bool for each id")
        if not 0 <= min(self.cls, self.sep) <= max(self.cls, self.sep) < len(self.continues):
            raise ValueError(f"{self.cls=}, {self.sep=} of {len(self.continues)} ids")


@dataclass(frozen=True)
class MaskingVocabulary(MaskingWords):
    """What BERT's masking asks of a vocabulary.

    Attributes:
        mask: Id that stands for a masked token.
        pad: Id that fills a sample up.
    """

    mask: int
    pad: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= min(self.mask, self.pad) <= max(self.mask, self.pad) < len(self.continues):
            raise ValueError(f"{self.mask=}, {self.pad=} of {len(self.continues)} ids")

    @classmethod
    def of_pieces(
        cls, pieces: Sequence[str], *, cls_id: int, sep: int, mask: int, pad: int
    ) -> MaskingVocabulary:
        """Return the vocabulary of WordPiece tokens, by id, where `##` continues a word."""
        continues = np.array([piece.startswith("##") for piece in pieces], dtype=np.bool_)
        return cls(cls_id, sep, continues, mask, pad)


@dataclass(frozen=True)
class MaskingPolicy:
    """How many tokens are chosen, and how long the pieces are.

    Attributes:
        probability: Part of the tokens.
        max_ngram: Most words that are chosen together.
        whole_words: Choose all tokens of a word or none.
        geometric: Draw the number of words from a geometric distribution (p = .2), as T5 and
            SpanBERT; otherwise n words have a probability proportional to 1 / n.
        favor_longer: Turn the latter around.
    """

    probability: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True
    geometric: bool = False
    favor_longer: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1 or self.max_ngram < 1:
            raise ValueError(f"{self.probability=}, {self.max_ngram=}")

    def cumulative(self) -> npt.NDArray[np.float64]:
        """Return the chances of 1, 2, ... words, summed up; with the rounding of numpy's choice."""
        chances = 1.0 / np.arange(1, self.max_ngram + 1)
        chances /= chances.sum()
        if self.favor_longer:
            chances = chances[::-1]
        summed = (chances / chances.sum()).cumsum()
        return np.asarray(summed / summed[-1])


def mask_tokens(
    tokens: npt.NDArray[np.int64],
    target_length: int,
    words: MaskingVocabulary,
    policy: MaskingPolicy,
    rng: np.random.RandomState,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return *tokens* with some replaced, and the positions of those chosen, in order.

    Of the chosen tokens 80% become the mask, 10% a random id of the vocabulary, and 10% stay.

    Args:
        tokens: int64 [length].
        target_length: Length that the sample was to have; bounds how many are chosen.
        words: The vocabulary.
        policy: How many, and how.
        rng: Advanced.
    """

    def replace(rng: np.random.RandomState) -> int | None:
        if rng.random_sample() < 0.8:
            return words.mask
        if rng.random_sample() >= 0.5:
            return int(rng.randint(0, len(words.continues)))
        return None

    masked = tokens.copy()
    chosen: list[int] = []
    for positions, replacements in choose_spans(
        tokens, target_length, words, policy, rng, replace=replace
    ):
        chosen.extend(positions)
        for position, replacement in zip(positions, replacements, strict=True):
            if replacement is not None:
                masked[position] = replacement
    return masked, np.array(sorted(chosen), dtype=np.int64)


def choose_spans(
    tokens: npt.NDArray[np.int64],
    target_length: int,
    words: MaskingWords,
    policy: MaskingPolicy,
    rng: np.random.RandomState,
    *,
    replace: Replace = lambda _: None,
    most_spans: int | None = None,
    most_spans_and_tokens: int | None = None,
) -> list[tuple[list[int], list[int | None]]]:
    """Choose pieces of text, in random order.

    Args:
        tokens: int64 [length].
        target_length: Length that the sample was to have; bounds how many tokens are chosen.
        words: The vocabulary.
        policy: How many, and how.
        rng: Advanced.
        replace: Draws what stands in place of a token, when that is chosen.
        most_spans: Stop at so many pieces.
        most_spans_and_tokens: Pass over a piece with which pieces and tokens would be more.

    Returns:
        The positions of each piece, and what `replace` gave for each.
    """
    positions, bounds = _words(tokens, words, whole_words=policy.whole_words)
    count = len(bounds) - 1
    wanted = min(
        policy.probability * target_length, max(1, round(len(tokens) * policy.probability))
    )
    cumulative = policy.cumulative()
    order = np.arange(count, dtype=np.int64)
    shuffle(rng, order)
    taken: set[int] = set()
    spans: list[tuple[list[int], list[int | None]]] = []
    for word in order.tolist():
        if len(taken) >= wanted or (most_spans is not None and len(spans) >= most_spans):
            break
        if policy.geometric:
            ngram = min(int(rng.geometric(_GEOMETRIC_P)), policy.max_ngram)
        else:
            ngram = 1 + int(cumulative.searchsorted(rng.random_sample(), side="right"))
        while True:
            piece = positions[bounds[word] : bounds[min(word + ngram, count)]]
            if len(taken) + len(piece) <= wanted or ngram == 1:
                break
            ngram -= 1
        if len(taken) + len(piece) > wanted or not taken.isdisjoint(piece):
            continue
        if (
            most_spans_and_tokens is not None
            and len(spans) + 1 + len(taken) + len(piece) > most_spans_and_tokens
        ):
            continue
        taken.update(piece)
        spans.append((piece, [replace(rng) for _ in piece]))
    return spans


def _words(
    tokens: npt.NDArray[np.int64], words: MaskingWords, *, whole_words: bool
) -> tuple[list[int], list[int]]:
    """Return positions that may be chosen, and where among these words begin and the last ends.

    A token that continues a word belongs to the word before it, be it in the other segment.
    """
    positions = np.flatnonzero((tokens != words.cls) & (tokens != words.sep))
    begins = np.ones(len(positions), dtype=np.bool_)
    if whole_words and len(positions):
        begins[1:] = ~words.continues[tokens[positions[1:]]]
    bounds = np.flatnonzero(begins).tolist()
    return positions.tolist(), [*bounds, len(positions)]
