"""Exchanges within an axis, of a single process; more are in `tests/distributed`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from lmcore.parallel import collectives as exchange
from lmcore.parallel.collectives import sum_together
from lmcore.parallel.mesh import Axis


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of what is exchanged; the other process has the same, and one more each."""
    sizes: list[int] = []

    def all_reduce(flat: Tensor, group: Any) -> None:
        assert group == "a group"
        sizes.append(flat.numel())
        flat.add_(flat + 1)

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    return sizes


def axis(size: int) -> Axis:
    group: Any = "a group"
    return Axis(0, size, tuple(range(size)), group)


@pytest.mark.parametrize("limit,sizes", [(1, [3, 4, 2]), (16, [7, 2]), (28, [7, 2]), (2**30, [9])])
def test_sums_of_few_at_a_time(
    limit: int, sizes: list[int], sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of any strides are summed in place, however many travel together."""
    monkeypatch.setattr(exchange, "_COPIED_BYTES", limit)
    before = [torch.arange(3.0), torch.arange(4.0).view(2, 2).t(), torch.ones(2)]
    tensors = [one.clone() for one in before]
    tensors[1] = before[1].contiguous().t().clone().t()
    sum_together(tensors, axis(2), share=2.0)
    assert sent == sizes
    for found, own in zip(tensors, before, strict=True):
        assert torch.equal(found, 4 * own + 1)


def test_nobody_to_sum_with(sent: list[int]) -> None:
    """A process that is alone sends nothing, and neither does one that has nothing."""
    tensor = torch.ones(2)
    sum_together([tensor], axis(1), share=0.5)
    sum_together([], axis(2))
    assert sent == []
    assert tensor.tolist() == [1.0, 1.0]
