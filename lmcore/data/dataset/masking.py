"""Random choice of the tokens that a model has to predict: BERT's masked words, T5's spans.

Words are chosen in random order, each with some of the words after it (n-grams), until a fraction
of the tokens is chosen.  All draws come from one `RandomState`, in Megatron's order, so that the
same seed chooses the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcore.data.dataset.shuffle import shuffle

__all__ = ["MaskingPolicy", "MaskingVocabulary", "MaskingWords", "choose_spans", "mask_tokens"]

_GEOMETRIC_P = 0.2  # SpanBERT, section 3.1 (https://arxiv.org/abs/1907.10529)

Replace = Callable[[np.random.RandomState], int | None]


@dataclass(frozen=True)
class MaskingWords:
    """Vocabulary properties needed to choose words.

    Attributes:
        cls: Id that begins a sample; never chosen.
        sep: Id that ends a segment; never chosen.
        continues: bool [vocabulary], True for tokens that continue the word before them, as
            `##ing` does; all False if each token is a word.
    """

    cls: int
    sep: int
    continues: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        if self.continues.ndim != 1 or self.continues.dtype != np.bool_:
            raise ValueError("`continues` has one bool per id")
        if not 0 <= min(self.cls, self.sep) <= max(self.cls, self.sep) < len(self.continues):
            raise ValueError(f"{self.cls=}, {self.sep=} of {len(self.continues)} ids")


@dataclass(frozen=True)
class MaskingVocabulary(MaskingWords):
    """Vocabulary properties needed for BERT's masking.

    Attributes:
        mask: Id that replaces masked tokens.
        pad: Id of the padding.
    """

    mask: int
    pad: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= min(self.mask, self.pad) <= max(self.mask, self.pad) < len(self.continues):
            raise ValueError(f"{self.mask=}, {self.pad=} of {len(self.continues)} ids")


@dataclass(frozen=True)
class MaskingPolicy:
    """Number of chosen tokens, and distribution of the span lengths.

    Attributes:
        probability: Fraction of tokens to choose.
        max_ngram: Maximum number of words in a span.
        whole_words: True to choose all tokens of a word or none.
        geometric: True to draw the words of a span from a geometric distribution (p = 0.2), as T5
            and SpanBERT do; False for n words with a probability proportional to 1 / n.
        favor_longer: True to reverse the latter distribution.
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
        """Return the cumulative probabilities of 1, 2, ... words, rounded as `numpy.choice`."""
        probabilities = 1.0 / np.arange(1, self.max_ngram + 1)
        probabilities /= probabilities.sum()
        if self.favor_longer:
            probabilities = probabilities[::-1]
        cumulative = (probabilities / probabilities.sum()).cumsum()
        return np.asarray(cumulative / cumulative[-1])


def mask_tokens(
    tokens: npt.NDArray[np.int64],
    target_length: int,
    words: MaskingVocabulary,
    policy: MaskingPolicy,
    rng: np.random.RandomState,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return masked tokens, int64 [length], and the chosen positions in order, int64 [chosen].

    80% of the chosen tokens become the mask, 10% a random id of the vocabulary, and 10% stay.

    Args:
        tokens: int64 [length], the text.
        target_length: Intended length of the sample, in tokens; limits the tokens chosen.
        words: Vocabulary properties.
        policy: Number of tokens and length of the spans.
        rng: Generator, advanced in place.

    Source:
        Devlin et al. 2018 (https://arxiv.org/abs/1810.04805), section 3.1; Megatron-LM,
        `create_masked_lm_predictions`.
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
    """Choose spans of text, in random order.

    Args:
        tokens: int64 [length], the text.
        target_length: Intended length of the sample, in tokens; limits the tokens chosen.
        words: Vocabulary properties.
        policy: Number of tokens and length of the spans.
        rng: Generator, advanced in place.
        replace: Function that draws the replacement of each chosen token.
        most_spans: Maximum number of spans.
        most_spans_and_tokens: Maximum of spans plus chosen tokens; a span that would exceed it is
            skipped.

    Returns:
        The positions of each span, and the result of *replace* for each position.

    Source:
        Megatron-LM, `create_masked_lm_predictions`.
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
            span = positions[bounds[word] : bounds[min(word + ngram, count)]]
            if len(taken) + len(span) <= wanted or ngram == 1:
                break
            ngram -= 1
        if len(taken) + len(span) > wanted or not taken.isdisjoint(span):
            continue
        if (
            most_spans_and_tokens is not None
            and len(spans) + 1 + len(taken) + len(span) > most_spans_and_tokens
        ):
            continue
        taken.update(span)
        spans.append((span, [replace(rng) for _ in span]))
    return spans


def _words(
    tokens: npt.NDArray[np.int64], words: MaskingWords, *, whole_words: bool
) -> tuple[list[int], list[int]]:
    """Return the positions that may be chosen, and the bounds of the words among them.

    A token that continues a word belongs to the word before it, even across segments.
    """
    positions = np.flatnonzero((tokens != words.cls) & (tokens != words.sep))
    begins = np.ones(len(positions), dtype=np.bool_)
    if whole_words and len(positions):
        begins[1:] = ~words.continues[tokens[positions[1:]]]
    bounds = np.flatnonzero(begins).tolist()
    return positions.tolist(), [*bounds, len(positions)]
