"""Cover of the layouts: which pairs of settings the cases of the fast set have."""

from __future__ import annotations

import itertools

import pytest
from layouts.cases import (
    ACCUMULATE,
    AXES,
    CASES,
    FAST,
    FULL,
    INTERLEAVED,
    KINDS,
    SP,
    TP,
    cover,
    covered,
    factors,
    levels,
    levels_and_pairs,
)

EVERY = [(size, name) for size, cases in CASES.items() for name in cases]
CHOSEN = [(size, name) for size, names in FAST.items() for name in names]


@pytest.mark.parametrize(
    "name, flags, size, expected",
    [
        ("dp", "", 2, {"data": "replicas"}),
        ("tp", TP, 2, {"tensor": "tensor parallel"}),
        (
            "llama/tp-pp-dp",
            f"{TP} {SP} {INTERLEAVED} {FULL} {ACCUMULATE}",
            8,
            {
                "kind": "llama",
                "data": "replicas",
                "tensor": "sequence parallel",
                "pipeline": "1f1b interleaved",
                "recompute": "full",
                "accumulation": "more",
            },
        ),
        (
            "hsdp2-cp",
            "--zero-stage 2 --data-parallel-replicas 2 --context-parallel-size 2",
            8,
            {"data": "hybrid zero2", "context": "context parallel"},
        ),
        ("zero1", "--use-distributed-optimizer", 2, {"data": "zero1"}),
    ],
)
def test_factors_are_those_of_the_flags(
    name: str, flags: str, size: int, expected: dict[str, str]
) -> None:
    """A case has a level of each axis that divides it, and of each factor that always applies."""
    usual = {"kind": "fp32", "recompute": "none", "accumulation": "usual", "processes": str(size)}
    assert factors(name, flags, size) == usual | expected


def test_the_fast_set_has_each_level_and_each_pair() -> None:
    """The fast set has each level of a factor, and each pair with an axis, that any case has."""
    everywhere = [factors(name, CASES[size][name], size) for size, name in EVERY]
    fast = [factors(name, CASES[size][name], size) for size, name in CHOSEN]
    for one in everywhere:
        for factor, level in one.items():
            assert any(other.get(factor) == level for other in fast), (factor, level)
        for first, second in itertools.combinations(set(one) - {"processes"}, 2):
            same = [
                other
                for other in fast
                if all(
                    factor in other and (factor in AXES or other[factor] == one[factor])
                    for factor in (first, second)
                )
            ]
            assert same, (first, one[first], second, one[second])


def test_the_fast_set_recomputes_and_accumulates_on_each_axis() -> None:
    """Each axis runs with each recomputation, accumulation and other axis; each kind runs."""
    found = covered(CASES, CHOSEN, levels_and_pairs)
    for axis in AXES:
        for other in (
            *(("recompute", level) for level in ("none", "full", "selective")),
            *(("accumulation", level) for level in ("usual", "more")),
            *((another, "") for another in AXES if another != axis),
        ):
            assert tuple(sorted([(axis, ""), other])) in found, (axis, other)
    assert {("kind", kind) for kind in KINDS} <= found
    assert {("processes", str(size)) for size in CASES} <= found


def test_a_cover_is_small() -> None:
    """A case that has all that others have makes these needless, unless it has more processes."""
    tables = {
        2: {"dp": "", "zero1": "--zero-stage 1", "zero1-full": "--zero-stage 1 --recompute full"}
    }
    assert cover(tables, levels) == {2: {"dp", "zero1-full"}}
