"""Mappings of sentences: C++ against Python, and what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data import native
from lmcore.data.dataset import sentence_index as sentence_mapping
from lmcore.data.dataset.sentence_index import (
    build_block_mapping,
    build_block_mapping_python,
    build_segment_mapping,
    build_segment_mapping_python,
)

needs_native = pytest.mark.skipif(not native.available, reason=native.reason)

DOCUMENTS = st.lists(
    st.lists(st.integers(0, 40) | st.sampled_from([512, 513]), max_size=8), min_size=1, max_size=15
)


def arrays(documents):
    starts = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    sizes = np.array([size for document in documents for size in document], dtype=np.int32)
    return starts, sizes


def segments(starts, sizes, **changes):
    """Map one epoch of samples of 10 tokens or a sentence, none shorter, but for *changes*."""
    asked = {
        "num_samples": None,
        "longest": 10,
        "short_probability": 0.0,
        "seed": 1,
        "least_sentences": 1,
    }
    return build_segment_mapping(starts, sizes, **{**asked, **changes})


@needs_native
@given(
    documents=DOCUMENTS,
    epochs=st.integers(1, 4),
    samples=st.integers(1, 60),
    longest=st.integers(2, 90),
    ratio=st.integers(0, 5),
    seed=st.integers(0, 2**31 - 1),
    least=st.integers(1, 3),
)
def test_segments_in_c_are_those_in_python(documents, epochs, samples, longest, ratio, seed, least):
    """C++ and Python give the same rows in the same order for any documents."""
    arguments = (*arrays(documents), epochs, samples, longest, ratio, seed, least)
    progress = np.zeros(1, dtype=np.int64)
    made = native.builders.build_segment_mapping(*arguments, progress)
    expected = build_segment_mapping_python(*arguments)
    assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
    assert made.tobytes() == expected.tobytes()
    assert progress[0] == len(made)


@needs_native
@pytest.mark.parametrize("ratio", [0, 1, 2, 6, 7, 8, 10, 64, 1000, 2**31 - 1])
def test_many_segments_in_c_are_those_in_python(ratio):
    """The same of more documents than C++ looks at together, and more draws than a state has."""
    dice = np.random.default_rng(ratio)
    sizes = dice.integers(0, 60, 12_000, dtype=np.int32)
    sizes[[5000, 5003, 9000]] = 513  # these documents, and no others around them, are left out
    ends = np.sort(dice.integers(0, len(sizes), 2000))
    starts = np.array([0, *ends, len(sizes)], dtype=np.int64)
    arguments = (starts, sizes, 3, 5000, 128, ratio, ratio, 2)
    made = native.builders.build_segment_mapping(*arguments)
    expected = build_segment_mapping_python(*arguments)
    assert made.tobytes() == expected.tobytes()
    assert len(made) > 5000


@needs_native
@given(
    documents=DOCUMENTS,
    epochs=st.integers(1, 4),
    samples=st.integers(1, 60),
    longest=st.integers(2, 90),
    seed=st.integers(0, 2**31 - 1),
    one=st.booleans(),
    title=st.integers(0, 100),
)
def test_blocks_in_c_are_those_in_python(documents, epochs, samples, longest, seed, one, title):
    """C++ and Python give the same blocks in the same order for any documents and titles."""
    titles = (np.arange(len(documents)) * 7 % (title + 1)).astype(np.int32)
    arguments = (*arrays(documents), titles, epochs, samples, longest, seed, one)
    made = native.builders.build_block_mapping(*arguments)
    expected = build_block_mapping_python(*arguments)
    assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
    assert made.tobytes() == expected.tobytes()


def test_an_epoch_by_hand(either):
    """Two documents at 10 tokens a sample: where each sample must end follows from the sizes."""
    # The first: 4+7 is full and two sentences are left over; the second has a single sentence.
    starts, sizes = arrays([[4, 7, 3, 5, 6, 1], [8]])
    mapping = segments(starts, sizes, least_sentences=2)
    assert sorted(mapping.tolist()) == [[0, 2, 10], [2, 6, 10]]
    mapping = segments(starts, sizes)
    assert sorted(mapping.tolist()) == [[0, 2, 10], [2, 6, 10], [6, 7, 10]]


def test_blocks_by_hand(either):
    """A longer title makes shorter blocks; numbers count from 0 in each epoch."""
    starts, sizes = arrays([[4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4], [600, 1]])
    titles = np.array([0, 12, 1], dtype=np.int32)
    mapping = build_block_mapping(starts, sizes, titles, num_samples=6, longest=16, seed=1)
    rows = [[0, 4, 0, 0], [4, 6, 0, 1], [6, 8, 1, 2], [8, 10, 1, 3], [10, 12, 1, 4]]
    assert sorted(mapping.tolist()) == sorted(rows + rows)


def test_short_samples_have_the_given_frequency(either):
    """With a probability of .1 about a tenth of the samples is shorter, of any length from 2."""
    starts, sizes = arrays([[10] * 40 for _ in range(400)])
    mapping = segments(starts, sizes, longest=50, short_probability=0.1, seed=3, least_sentences=2)
    short = mapping[mapping[:, 2] < 50, 2]
    assert 0.07 < len(short) / len(mapping) < 0.13
    assert short.min() >= 2
    assert len(np.unique(short)) > 30


def test_probabilities_round_as_in_c():
    """One in how many samples is short: halves round up, as C's `round` does."""
    assert [sentence_mapping._short_ratio(p) for p in (0.0, 0.1, 0.4, 1.0)] == [0, 10, 3, 1]


@pytest.mark.parametrize("documents", [[], [[]], [[5]], [[5, 600]], [[3], [], [4]]])
def test_documents_without_a_sample_are_an_error(either, documents):
    """Documents that make no sample are an error, not an endless loop."""
    starts, sizes = arrays(documents)
    for samples in (None, 10):
        with pytest.raises(DataError, match="make no sample"):
            segments(starts, sizes, num_samples=samples, short_probability=0.1, least_sentences=2)


@pytest.mark.parametrize(
    "starts, sizes",
    [
        (np.array([], np.int64), np.array([1], np.int32)),
        (np.array([0, 2], np.int64), np.array([1], np.int32)),
        (np.array([-1, 1], np.int64), np.array([1], np.int32)),
        (np.array([0, 2, 1], np.int64), np.array([1, 1], np.int32)),
    ],
)
def test_documents_outside_the_sentences_are_refused(either, starts, sizes):
    """Bounds that fall, or lie outside the sentences, are refused before anything is read."""
    with pytest.raises(ValueError):
        segments(starts, sizes, num_samples=1, short_probability=0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"longest": 1},
        {"seed": -1},
        {"seed": 2**31},
        {"num_samples": 0},
        {"short_probability": 1.5},
        {"short_probability": 1e-12},
        {"least_sentences": 0},
    ],
)
def test_settings_out_of_range_are_refused(either, change):
    """Each setting is held to its range."""
    with pytest.raises(ValueError):
        segments(*arrays([[1, 2]]), **{"num_samples": 3, **change})


def test_titles_belong_to_the_documents(either):
    """Another number of titles than documents is refused."""
    with pytest.raises(ValueError, match="title"):
        build_block_mapping(*arrays([[1, 2]]), np.int32([1, 2]), num_samples=3, longest=10, seed=1)
