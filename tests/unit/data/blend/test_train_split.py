"""Splits: Megatron's bounds, and parts that stay empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.config.derived.split import parse_split
from lmcore.config.section.data import SPLIT_RULES
from lmcore.data.blend.train_split import split_documents, split_ranges


@pytest.mark.parametrize(
    "documents, split, bounds, legacy",
    [
        (79_000, "949,50,1", (0, 74971, 78921, 79000), None),
        (10, "949,50,1", (0, 9, 10, 10), (0, 10, 10, 10)),
        (10, "949/50/1", (0, 9, 10, 10), (0, 10, 10, 10)),
        (88, "1,1,1", (0, 29, 59, 88), (0, 30, 59, 88)),
        (1000, "100,0,0", (0, 1000, 1000, 1000), None),
        (1000, "100", (0, 1000, 1000, 1000), None),
        (100, "90,10", (0, 90, 100, 100), None),
        (0, "969,30,1", (0, 0, 0, 0), None),
    ],
)
def test_bounds(documents, split, bounds, legacy):
    """Shares give Megatron's bounds by either rule; missing ones are 0."""
    assert split_documents(documents, parse_split(split)) == bounds
    assert split_documents(documents, parse_split(split), "legacy") == (legacy or bounds)


@pytest.mark.parametrize("rule", SPLIT_RULES)
@given(
    documents=st.integers(0, 5000),
    shares=st.tuples(*[st.one_of(st.integers(0, 1000), st.floats(0, 100))] * 3),
)
def test_bounds_are_a_partition(rule, documents, shares):
    """Bounds rise from 0 to the number of documents, whatever the shares."""
    split = parse_split(f"{shares[0] + 1},{shares[1]},{shares[2]}")
    bounds = split_documents(documents, split, rule)
    assert list(bounds) == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0, documents)


@pytest.mark.parametrize("documents, helps", [(1, False), (2, True)])
def test_hint_of_a_larger_share_only_if_one_helps(documents, helps):
    """No share divides a text file that is one document: the hint makes documents of paragraphs."""
    with pytest.raises(DataError) as caught:
        split_ranges(documents, parse_split("969,30,1"), needed=("train", "valid"))
    assert ("larger share" in caught.value.hint) is helps
    assert ("--document-per paragraph" in caught.value.hint) is not helps
    assert "--eval-iters 0" in caught.value.hint
    if helps:
        split_ranges(documents, parse_split("1,1,0"), needed=("train", "valid"))


def test_empty_part_is_refused_only_where_it_is_needed():
    """Ten documents leave none for validation: an error that says so, unless nothing validates."""
    with pytest.raises(DataError) as caught:
        split_ranges(10, parse_split("979,20,1"), needed=("train", "valid"))
    assert caught.value.what == "`--split 979,20,1` leaves no validation documents"
    assert "10 documents" in caught.value.why
    assert "--eval-iters 0" in caught.value.hint
    assert split_ranges(10, parse_split("979,20,1"), needed=("train",))["train"] == (0, 10)
