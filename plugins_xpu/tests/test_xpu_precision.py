"""The precisions of an Intel GPU: the default, and reasons against unavailable ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.plugin.hook_calls import within_dtypes
from lmcore_xpu import plugin

ALL = frozenset({"float64", "float32", "float16", "bfloat16"})


def policies(dtypes: frozenset[str]) -> dict[str, Any]:
    device: Any = SimpleNamespace(type="xpu", dtypes=dtypes)
    offered = plugin.lmcore_precision_policies(device)
    return {policy.name: within_dtypes(policy, device) for policy in offered}


@pytest.mark.parametrize(
    "dtypes, default, refused",
    [
        (ALL, "bf16", set()),
        (ALL - {"float64"}, "bf16", {"fp64"}),
        (ALL - {"bfloat16", "float64"}, "fp32", {"bf16", "fp64"}),
        (ALL - {"float16"}, "bf16", {"fp16"}),
    ],
)
def test_precisions(dtypes: frozenset[str], default: str, refused: set[str]) -> None:
    """bfloat16 is the default where it is, float64 never; what a card lacks is refused by name."""
    found = policies(dtypes)
    usable = [policy for policy in found.values() if policy.available() is None]
    assert max(usable, key=lambda policy: policy.priority).name == default
    assert {name for name, policy in found.items() if policy.available() is not None} == refused
    for name in refused:
        assert "computes products in" in found[name].available()
    assert "fp8" not in found


def test_what_they_do() -> None:
    """Half precisions compute products by autocast; fp16 scales the loss; weights stay wide."""
    found = policies(ALL)
    assert {policy.keep for policy in found.values()} == {"float32", "float64"}
    assert [name for name, policy in found.items() if policy.loss_scaling] == ["fp16"]
    assert (found["bf16"].compute, found["fp64"].compute) == ("bfloat16", "float64")
