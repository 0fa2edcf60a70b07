"""Choice of masked tokens; test_megatron_samples.py compares it with Megatron's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data.dataset.masking import (
    MaskingPolicy,
    MaskingVocabulary,
    MaskingWords,
    choose_spans,
    mask_tokens,
)

CLS, SEP, MASK, PAD = 1, 2, 3, 0
CONTINUES = np.arange(50) % 4 == 3
WORDS = MaskingVocabulary(CLS, SEP, CONTINUES, MASK, PAD)


def sample(body) -> np.ndarray:
    half = len(body) // 2
    return np.array([CLS, *body[:half], SEP, *body[half:], SEP], dtype=np.int64)


BODIES = st.lists(st.integers(4, 49), max_size=60)


@given(body=BODIES, seed=st.integers(0, 2**32 - 1), ngram=st.integers(1, 10), geo=st.booleans())
def test_whole_words_within_the_budget(body, seed, ngram, geo):
    """Pieces are whole words, do not overlap, spare special tokens, and stay within the share."""
    tokens = sample(body)
    policy = MaskingPolicy(max_ngram=ngram, geometric=geo)
    spans = choose_spans(tokens, 64, WORDS, policy, np.random.RandomState(seed))
    chosen = [position for positions, _ in spans for position in positions]
    assert len(chosen) == len(set(chosen))
    assert len(chosen) <= min(0.15 * 64, max(1, round(len(tokens) * 0.15)))
    assert not set(tokens[chosen].tolist()) & {CLS, SEP}
    words = []  # by plain loops: the positions of each word
    for position, token in enumerate(tokens.tolist()):
        if token in {CLS, SEP}:
            continue
        if CONTINUES[token] and words:
            words[-1].append(position)
        else:
            words.append([position])
    for positions, _ in spans:
        inside = [word for word in words if set(word) <= set(positions)]
        assert sorted(itertools.chain(*inside)) == positions
        assert len(inside) <= ngram


def test_replacements_have_their_shares():
    """Of the chosen tokens 80% become the mask, 10% another id, and 10% stay."""
    rng = np.random.RandomState(0)
    counts = {"mask": 0, "same": 0, "other": 0}
    for _ in range(2000):
        tokens = sample(rng.randint(4, 50, 100).tolist())
        masked, chosen = mask_tokens(tokens, 103, WORDS, MaskingPolicy(), rng)
        untouched = np.setdiff1d(np.arange(len(tokens)), chosen)
        assert (masked[untouched] == tokens[untouched]).all()
        assert (np.diff(chosen) > 0).all()
        for before, after in zip(tokens[chosen], masked[chosen], strict=True):
            kind = "mask" if after == MASK else "same" if after == before else "other"
            counts[kind] += 1
    total = sum(counts.values())
    # A random id is the mask, or the same, once in fifty.
    assert counts["mask"] / total == pytest.approx(0.802, abs=0.01)
    assert counts["same"] / total == pytest.approx(0.102, abs=0.01)
    assert counts["other"] / total == pytest.approx(0.096, abs=0.01)


@pytest.mark.parametrize("favor_longer", [False, True])
def test_ngrams_have_numpy_s_chances(favor_longer):
    """The length drawn is that which numpy's `choice` draws from the same generator."""
    policy = MaskingPolicy(favor_longer=favor_longer)
    chances = np.array([6, 3, 2]) / 11
    ours, theirs = np.random.RandomState(5), np.random.RandomState(5)
    for _ in range(2000):
        mine = 1 + policy.cumulative().searchsorted(ours.random_sample(), side="right")
        assert mine == theirs.choice([1, 2, 3], p=chances[::-1] if favor_longer else chances)


def test_a_sample_of_one_word_has_it_chosen():
    """At least one token is chosen, unless the sample was to be too short for that."""
    tokens = np.array([CLS, 5, SEP])
    policy = MaskingPolicy()
    assert len(mask_tokens(tokens, 64, WORDS, policy, np.random.RandomState(0))[1]) == 1
    assert len(mask_tokens(tokens, 2, WORDS, policy, np.random.RandomState(0))[1]) == 0


def test_limits_on_pieces_hold():
    """No more pieces, nor pieces and tokens, than asked for."""
    tokens = sample(list(range(4, 50)) * 4)
    policy = MaskingPolicy(max_ngram=10, geometric=True, probability=0.5)
    for seed in range(20):
        rng = np.random.RandomState(seed)
        assert len(choose_spans(tokens, 500, WORDS, policy, rng, most_spans=3)) == 3
        rng = np.random.RandomState(seed)
        spans = choose_spans(tokens, 500, WORDS, policy, rng, most_spans_and_tokens=20)
        assert 10 < len(spans) + sum(len(positions) for positions, _ in spans) <= 20


@pytest.mark.parametrize(
    "make",
    [
        lambda: MaskingPolicy(probability=0.0),
        lambda: MaskingPolicy(probability=1.0),
        lambda: MaskingPolicy(max_ngram=0),
        lambda: MaskingWords(1, 50, CONTINUES),
        lambda: MaskingWords(-1, 2, CONTINUES),
        lambda: MaskingWords(1, 2, np.zeros(50)),
        lambda: MaskingVocabulary(1, 2, CONTINUES, 50, 0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    """Each setting is held to its range."""
    with pytest.raises(ValueError):
        make()
