"""Weights, sizes and orders of a blend."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.config.section.data import BLEND_RULES
from lmcore.data import native
from lmcore.data.blend import index_cache as blend_cache
from lmcore.data.blend.index import (
    BlendWeights,
    build_blend_index,
    build_exhaustive_index,
    normalize,
    source_sizes,
)
from lmcore.data.blend.index_cache import blend_index


def test_published_vector():
    """The reference's ten choices."""
    assert build_blend_index([0.2, 0.3, 0.5], 10)[0].tolist() == [2, 1, 0, 2, 1, 2, 0, 2, 1, 2]


@pytest.mark.parametrize(
    "weights,order,older",
    [
        ([0.7, 0.2, 0.1], "010200100001020010000102000100", "010200010001020001000102000100"),
        ([0.6, 0.3, 0.1], "012001001001200100100120010010", "010201001001020100100102010010"),
        ([70, 20, 10], "010200010001020001000102000100", "010200100001020010000102001000"),
    ],
)
def test_ties(weights, order, older):
    """The last bits of the weights decide ties: megatron-core's orders, and lmcore 2026.11's."""
    for rule, expected in zip(BLEND_RULES, (order, older), strict=True):
        found = build_blend_index(BlendWeights.given(weights, rule).order, len(expected))[0]
        assert "".join(map(str, found)) == expected


def test_sizes_are_of_weights_normalized_once():
    """A second normalization would round other shares up."""
    weights = BlendWeights.given([0.7, 0.2, 0.1], "megatron-core")
    assert weights.sizes == normalize([0.7, 0.2, 0.1])
    assert weights.order == normalize(weights.sizes) != weights.sizes
    by_size = BlendWeights.by_size([7, 2, 1])
    assert by_size.order == by_size.sizes == normalize([7, 2, 1])


def test_sizes_of_the_sources():
    """Shares are rounded up, and half a percent more is built of each, rounded up again."""
    assert source_sizes([0.5, 0.5], 1000) == (1000, [503, 503])
    assert source_sizes([1 / 3, 2 / 3], 10) == (11, [5, 8])
    assert source_sizes([1.0], 7) == (7, [8])


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_weights_sum_to_one(weights):
    """The ratios of any weights are kept."""
    shares = normalize(weights)
    assert abs(sum(shares) - 1) < 1e-9
    assert shares == pytest.approx([weight / sum(weights) for weight in weights])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_every_sample_once(lengths):
    """Used up, each source has given each of its samples once, in order, and near its share."""
    dataset, sample = build_exhaustive_index(lengths)
    total = sum(lengths)
    for source, length in enumerate(lengths):
        assert sample[dataset == source].tolist() == list(range(length))
        taken = np.cumsum(dataset == source)
        share = length / total * np.arange(1, total + 1)
        assert np.abs(taken - share).max() <= len(lengths)


def test_small_blends_are_built_in_memory(tmp_path):
    """No file is worth a blend of few samples."""
    found = blend_index([0.5, 0.5], 100, tmp_path / "cache", "train")
    assert len(found[0]) == 100
    assert not (tmp_path / "cache").exists()


def test_large_blends_are_built_once(tmp_path, monkeypatch, caplog):
    """The second process maps the files of the first; a directory that is not writable warns."""
    monkeypatch.setattr(blend_cache, "_SMALL", 10)
    weights, where = [0.25, 0.75], tmp_path / "cache"
    expected = build_blend_index(weights, 100)
    first = blend_index(weights, 100, where, "train")
    monkeypatch.setattr(blend_cache, "build_blend_index", None)
    again = blend_index(weights, 100, where, "train")
    monkeypatch.undo()
    monkeypatch.setattr(blend_cache, "_SMALL", 10)
    for one in (first, again):
        assert one[0].tolist() == expected[0].tolist()
        assert one[1].tolist() == expected[1].tolist()
    assert not again[1].flags.writeable
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        memory = blend_index([0.5, 0.5], 50, tmp_path / "file/cache", "train")
    assert len(memory[0]) == 50
    assert "is kept in memory" in caplog.text


@pytest.mark.skipif(native.builders is None, reason="no native builders here")
def test_the_cached_index_is_the_key_s(tmp_path, monkeypatch):
    """Other weights or another size are another file."""
    monkeypatch.setattr(blend_cache, "_SMALL", 10)
    for weights, size in (([0.25, 0.75], 100), ([0.5, 0.5], 100), ([0.5, 0.5], 101)):
        found = blend_index(weights, size, tmp_path, "train")
        assert found[0].tolist() == build_blend_index(weights, size)[0].tolist()
    assert len(list(tmp_path.glob("*.json"))) == 3
