"""Our shuffle against numpy's own, value for value and state for state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data import native
from lmcore.data.dataset import shuffle as shuffle_module
from lmcore.data.dataset.shuffle import shuffle

TYPES = [np.int32, np.uint32, np.int64]
EDGES = [0, 1, 2, 3, 623, 624, 625, 2047, 2048, 2049, 65_535, 65_536, 65_537, 300_001]


@pytest.fixture
def either(either, monkeypatch):
    """Run a test on C++, however few values there are, and without it."""
    monkeypatch.setattr(shuffle_module, "_LEAST", 0)


def compare(size: int, seed: int, dtype, drawn: int) -> None:
    ours, theirs = np.random.RandomState(seed), np.random.RandomState(seed)
    for rng in (ours, theirs):
        rng.random_sample(drawn)
    mine = np.arange(size).astype(dtype)
    expected = mine.copy()
    progress = np.zeros(1, dtype=np.int64)
    shuffle(ours, mine, progress)
    theirs.shuffle(expected)
    assert mine.tobytes() == expected.tobytes()
    assert progress[0] == size
    assert ours.randint(0, 2**31, 5).tolist() == theirs.randint(0, 2**31, 5).tolist()
    assert ours.normal() == theirs.normal()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", EDGES)
def test_edges(either, size, dtype):
    """Around the generator's block, ours, and 2**16, values and later draws are numpy's."""
    compare(size, 1234, dtype, 0)


@given(
    size=st.integers(0, 5000),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(TYPES),
    drawn=st.integers(0, 700),
)
def test_any_size_seed_and_position(size, seed, dtype, drawn):
    """The shuffle and the draws after it equal numpy's, whatever was drawn before."""
    compare(size, seed, dtype, drawn)


def test_a_gaussian_kept_for_later_stays(either):
    """The second number of a pair of normals, which the state keeps, survives a shuffle."""
    ours, theirs = np.random.RandomState(3), np.random.RandomState(3)
    values = np.arange(1000)
    assert ours.normal() == theirs.normal()
    shuffle(ours, values)
    theirs.shuffle(np.arange(1000))
    assert ours.normal() == theirs.normal()


@pytest.mark.parametrize(
    "values",
    [np.arange(50)[::2], np.arange(50, dtype=np.uint8), np.arange(60).reshape(20, 3)],
    ids=["strided", "uint8", "rows"],
)
def test_other_arrays_are_shuffled_by_numpy(either, values):
    """Arrays that the C++ does not accept are shuffled by numpy."""
    expected = values.copy()
    np.random.RandomState(5).shuffle(expected)
    shuffle(np.random.RandomState(5), values)
    assert values.tolist() == expected.tolist()


def test_read_only_values_are_refused(either):
    """Values that cannot be written are an error, and stay."""
    values = np.arange(10)
    values.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        shuffle(np.random.RandomState(0), values)


@pytest.mark.skipif(not native.available, reason=native.reason)
@pytest.mark.parametrize(
    "values, key, position",
    [
        (np.arange(9), np.zeros(623, np.uint32), 0),
        (np.arange(9), np.zeros(624, np.uint32), 625),
        (np.arange(9), np.zeros(624, np.uint32), -1),
        (np.arange(9), np.zeros(624, np.int32), 0),
        (np.arange(9.0), np.zeros(624, np.uint32), 0),
        (np.arange(9)[::2], np.zeros(624, np.uint32), 0),
    ],
)
def test_native_refuses_what_is_no_state_and_no_values(values, key, position):
    """C++ takes only a whole state and contiguous integers."""
    with pytest.raises(ValueError):
        native.builders.shuffle(values, key, position)
