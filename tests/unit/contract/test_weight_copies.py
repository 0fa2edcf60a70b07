"""Copies of weights for products: when they are used, and when not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lmcore.contract.weight_copies import (
    copies_of,
    forget_copies,
    keep_copies,
    narrow_weight,
    use_copies,
)

NARROW = torch.bfloat16


@pytest.fixture
def weight() -> nn.Parameter:
    """A weight whose copy is current."""
    weight = nn.Parameter(torch.randn(3, 4))
    keep_copies([weight], NARROW)
    narrow_weight(weight, NARROW)
    use_copies([weight])
    return weight


def is_used(weight: nn.Parameter) -> bool:
    return narrow_weight(weight, NARROW) is narrow_weight(weight, NARROW)


def test_a_weight_without_a_copy_is_cast() -> None:
    """Each call casts, and nothing is kept."""
    weight = nn.Parameter(torch.randn(3, 4))
    found = narrow_weight(weight, NARROW)
    assert torch.equal(found, weight.detach().bfloat16())
    assert not found.requires_grad
    assert copies_of([weight]) == [None]
    use_copies([weight])
    assert not is_used(weight)
    assert narrow_weight(weight, torch.float32).data_ptr() == weight.data_ptr()


def test_nothing_is_used_before_the_optimizer_says_so() -> None:
    """Until then a weight may change by a load that its version does not count."""
    weight = nn.Parameter(torch.randn(3, 4))
    keep_copies([weight], NARROW)
    assert copies_of([weight]) == [None]
    assert not is_used(weight)
    (memory,) = copies_of([weight])
    use_copies([weight])
    assert narrow_weight(weight, NARROW) is memory


def test_another_dtype_is_cast(weight: nn.Parameter) -> None:
    """The copy is of one dtype."""
    assert is_used(weight)
    assert narrow_weight(weight, torch.float16).dtype == torch.float16
    assert is_used(weight)


def test_a_weight_that_changed_is_cast(weight: nn.Parameter) -> None:
    """A change in place, other memory, and `forget_copies` each end the use of a copy."""
    old = narrow_weight(weight, NARROW)
    kept = old.clone()
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(narrow_weight(weight, NARROW), weight.detach().bfloat16())
    assert torch.equal(old, kept)  # a graph may still read it
    assert not is_used(weight)
    use_copies([weight])
    assert is_used(weight)
    weight.data = torch.randn(3, 4)
    assert torch.equal(narrow_weight(weight, NARROW), weight.detach().bfloat16())
    use_copies([weight])
    forget_copies([weight])
    assert not is_used(weight)


def test_a_copy_ends_with_its_weight() -> None:
    """Models that are freed leave no copies."""
    weight = nn.Parameter(torch.randn(3, 4))
    keep_copies([weight], NARROW)
    seen = weakref.ref(narrow_weight(weight, NARROW))
    del weight
    gc.collect()
    assert seen() is None
