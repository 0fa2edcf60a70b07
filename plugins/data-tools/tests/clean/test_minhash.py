"""MinHash: signatures against true similarity, and as a slow computation gives them."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError
from lmcore.data.native import builders
from lmcore_data_tools.clean.minhash import MinHash, jaccard, shingle_set


def true_similarity(first: str, second: str, size: int = 5) -> float:
    sets = [
        {text[at : at + size] for at in range(len(text) - size + 1)} for text in (first, second)
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def random_text(choice: random.Random, length: int) -> str:
    return "".join(choice.choices("abcdefghijklmnopqrstuvwxyz    ", k=length))


@given(st.text(min_size=5, max_size=80), st.text(min_size=5, max_size=80))
def test_jaccard_is_exact(first: str, second: str) -> None:
    """The similarity of two texts is the Jaccard index of their sets of shingles."""
    found = jaccard(shingle_set(first, 5), shingle_set(second, 5))
    assert found == true_similarity(first, second)


def test_known_similarity() -> None:
    """Two texts share nine of their ten shingles each: 9 / 11."""
    first, second = "abcdefghijklmn", "abcdefghijklmX"
    assert jaccard(shingle_set(first, 5), shingle_set(second, 5)) == 9 / 11


@given(st.text(max_size=400), st.integers(0, 5))
def test_signature_as_defined(text: str, seed: int) -> None:
    """Each number is the least value of its function, however the shingles are taken in parts."""
    minhash = MinHash(seed=seed, hashes=20, bands=4)
    factors, terms = minhash._functions
    weights = minhash._shingle_factors.tolist()
    points = [ord(char) for char in text]
    points += [0] * (5 - len(points))
    values = []
    for at in range(len(points) - 4):
        value = sum(point * weight for point, weight in zip(points[at:], weights, strict=False))
        value &= 0xFFFFFFFF
        value ^= value >> 16
        value = value * 0x85EBCA6B & 0xFFFFFFFF
        value ^= value >> 13
        value = value * 0xC2B2AE35 & 0xFFFFFFFF
        values.append(value ^ value >> 16)
    expected = [
        min((factor * value + term) & 0xFFFFFFFF for value in values)
        for factor, term in zip(factors[:, 0].tolist(), terms[:, 0].tolist(), strict=True)
    ]
    for native in (False, True):
        assert minhash.signatures([text], native=native).tolist() == [expected]


@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=8), st.integers(1, 7), st.integers(1, 40)
)
def test_native_is_equal(texts: list[str], shingle: int, hashes: int) -> None:
    """C++ and numpy give the same signatures of any number of texts."""
    minhash = MinHash(hashes=hashes, bands=1, shingle=shingle)
    both = [minhash.signatures(texts, native=native) for native in (True, False)]
    assert both[0].shape == (len(texts), hashes)
    assert both[0].dtype == both[1].dtype == np.uint32
    assert (both[0] == both[1]).all()


def test_native_is_equal_on_long_texts() -> None:
    """So they do where a text is longer than the parts that it is taken in."""
    choice = random.Random(1)
    texts = [random_text(choice, length) for length in (127, 128, 132, 2051, 2052, 2053, 9000)]
    minhash = MinHash()
    assert (minhash.signatures(texts) == minhash.signatures(texts, native=False)).all()


@pytest.mark.skipif(builders is None, reason="needs lmcore._native")
def test_native_refuses_what_does_not_fit() -> None:
    """Wrong types, ends outside the text or out of order, and shingles of nothing are refused."""
    good: dict[str, Any] = {
        "characters": np.arange(10, dtype=np.uint32),
        "ends": np.array([4, 10]),
        "weights": np.ones(5, np.uint32),
        "factors": np.ones(3, np.uint32),
        "terms": np.ones(3, np.uint32),
    }
    assert builders.minhash_signatures(**good).shape == (2, 3)
    for changed in (
        {"ends": np.array([4, 11])},
        {"ends": np.array([4, 3])},
        {"ends": np.array([-1, 3])},
        {"weights": np.ones(0, np.uint32)},
        {"terms": np.ones(2, np.uint32)},
        {"characters": np.arange(10, dtype=np.int64)},
    ):
        with pytest.raises(ValueError, match=next(iter(changed)) + r"|ends|shingle|differ"):
            builders.minhash_signatures(**{**good, **changed})


@pytest.mark.parametrize("edits, length", [(1, 2000), (8, 2000), (40, 2000), (4, 300)])
def test_estimate(edits: int, length: int) -> None:
    """Over many pairs the share of equal numbers is the similarity, with the spread of theory."""
    choice = random.Random(edits)
    errors = []
    for seed in range(120):
        first = random_text(choice, length)
        changed = list(first)
        for at in choice.sample(range(length), edits):
            changed[at] = "#"
        second = "".join(changed)
        minhash = MinHash(seed=seed)
        one, other = minhash.signatures([first, second])
        estimate = float((one == other).mean())
        truth = true_similarity(first, second)
        errors.append((estimate - truth) / np.sqrt(truth * (1 - truth) / 100))
    # Standardized errors: mean 0 within three standard errors, spread near 1.
    assert abs(np.mean(errors)) < 3 / np.sqrt(len(errors))
    assert 0.8 < np.std(errors) < 1.25


def test_bands_find_what_theory_says() -> None:
    """Pairs at .9 are found 98.6 times in 100, pairs at .6 six times."""
    choice = random.Random(5)

    def found(edits: int) -> tuple[float, float]:
        hits, truths = 0, []
        for seed in range(200):
            first = random_text(choice, 1000)
            changed = list(first)
            for at in choice.sample(range(1000), edits):
                changed[at] = "#"
            second = "".join(changed)
            minhash = MinHash(seed=seed)
            one, other = minhash.band_keys(minhash.signatures([first, second])).tolist()
            hits += bool(set(one) & set(other))
            truths.append(true_similarity(first, second))
        return hits / 200, float(np.mean([1 - (1 - truth**10) ** 10 for truth in truths]))

    for edits in (10, 50, 120):
        share, expected = found(edits)
        assert share == pytest.approx(expected, abs=3.5 * np.sqrt(expected * (1 - expected) / 200))


def test_same_on_every_machine() -> None:
    """Signatures do not depend on the process; a change of them would be a change of results."""
    code = (
        "from lmcore_data_tools.clean.minhash import MinHash;"
        "m = MinHash(seed=7); print(m.band_keys(m.signatures(['the same text again'])).tolist()[0])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    minhash = MinHash(seed=7)
    keys = minhash.band_keys(minhash.signatures(["the same text again"])).tolist()[0]
    assert told.stdout.strip() == str(keys)
    assert keys[0] == FIRST_KEY


FIRST_KEY = 7375950493220613916


def test_bands_must_divide() -> None:
    """Bands of unequal size are refused."""
    with pytest.raises(ConfigError, match="`--bands 7` does not divide `--hashes 100`"):
        MinHash(bands=7)
