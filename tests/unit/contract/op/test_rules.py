"""Rules that kernels' `supports` are made of: what each refuses, in which words and which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lmcore.contract import OpContext, Reject
from lmcore.contract.op.packages import Package, UsablePackages
from lmcore.contract.op.rules import (
    HALF,
    Rule,
    dtypes,
    eager,
    head_dim,
    no_dropout,
    package,
    supports,
    unmasked,
)


def case(dtype: str = "bfloat16", **attributes: Any) -> OpContext:
    return OpContext("chip", dtype, attributes)


@pytest.mark.parametrize(
    "rule, good, bad, said",
    [
        (dtypes(*HALF), case("float16"), case("float32"),
         "computes in bfloat16 and float16, not float32"),
        (head_dim(128), case(head_dim=128), case(head_dim=136),
         "takes 8 to 128 channels a head, in steps of 8, not 136"),
        (head_dim(128), case(head_dim=8), case(head_dim=60),
         "takes 8 to 128 channels a head, in steps of 8, not 60"),
        (head_dim(64, 16, 32), case(head_dim=48), case(head_dim=16),
         "takes 32 to 64 channels a head, in steps of 16, not 16"),
        (no_dropout, case(dropout=0.0), case(dropout=0.1), "has no dropout"),
        (no_dropout, case(), case(dropout=0.1), "has no dropout"),
        (unmasked, case(masked=False), case(masked=True), "takes no mask"),
        (eager, case(compile=False), case(compile=True),
         "is not for compiled blocks: the compiler cannot follow it, and would cut the block"),
    ],
)  # fmt: skip
def test_each_rule(rule: Rule, good: OpContext, bad: OpContext, said: str) -> None:
    """A rule lets its cases pass and names the limit that another one breaks."""
    assert rule(good) is None
    assert rule(bad) == said


def test_the_first_reason_is_the_answer() -> None:
    """Rules are asked in order, and none after one that refuses."""
    asked: list[str] = []

    def rule(name: str, answer: str | None) -> Callable[[OpContext], str | None]:
        def ask(context: OpContext) -> str | None:
            asked.append(name)
            return answer

        return ask

    verdict = supports(rule("a", None), rule("b", "too wide"), rule("c", "too old"))(case())
    assert verdict == Reject("too wide")
    assert asked == ["a", "b"]
    assert supports()(case()) is None
    assert supports(rule("d", None))(case()) is None


def test_a_package_is_required() -> None:
    """A missing package, one that does not fit and one that does not load each say so."""
    usable = UsablePackages(
        {"fits": Package("1"), "old": Package("1", "is for torch 2.8"), "broken": Package("1")},
        {"broken": "undefined symbol"}.get,
    )
    said = {name: package(usable, name)(case()) for name in ("fits", "old", "broken", "gone")}
    assert said == {
        "fits": None,
        "old": "is for torch 2.8",
        "broken": "undefined symbol",
        "gone": "needs `gone`, not installed",
    }
    assert package(usable, "broken", load=False)(case()) is None
