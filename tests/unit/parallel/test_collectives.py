"""Collectives over one axis, in a single process; several ranks are in `tests/distributed`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from lmcore.parallel import collectives
from lmcore.parallel.collectives import all_reduce_coalesced, broadcast_coalesced
from lmcore.parallel.mesh import Axis


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the reduced buffers; the other rank has this rank's values plus one."""
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
def test_all_reduce_coalesced(
    limit: int, sizes: list[int], sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of any strides are summed in place, for any size of the buffers."""
    monkeypatch.setattr(collectives, "_COALESCED_BYTES", limit)
    before = [torch.arange(3.0), torch.arange(4.0).view(2, 2).t(), torch.ones(2)]
    tensors = [one.clone() for one in before]
    tensors[1] = before[1].contiguous().t().clone().t()
    all_reduce_coalesced(tensors, axis(2), scale=2.0)
    assert sent == sizes
    for found, own in zip(tensors, before, strict=True):
        assert torch.equal(found, 4 * own + 1)


def test_no_collective_without_need(sent: list[int]) -> None:
    """An axis of one rank, or an empty list, runs no all-reduce."""
    tensor = torch.ones(2)
    all_reduce_coalesced([tensor], axis(1), scale=0.5)
    all_reduce_coalesced([], axis(2))
    assert sent == []
    assert tensor.tolist() == [1.0, 1.0]


def test_expanded_tensors_are_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that an expanded tensor shows several times is sent once, and received."""
    sizes: list[int] = []

    def broadcast(flat: Tensor, src: int, group: Any) -> None:
        assert (src, group) == (0, "a group")
        sizes.append(flat.numel())
        flat.add_(1)

    monkeypatch.setattr(distributed, "broadcast", broadcast)
    tensors = [torch.arange(3.0).view(3, 1).expand(3, 4), torch.zeros(2), torch.ones(()).expand(5)]
    broadcast_coalesced(tensors, axis(2))
    assert sizes == [3 + 2 + 1]
    assert torch.equal(tensors[0], torch.arange(1.0, 4.0).view(3, 1).expand(3, 4))
    assert tensors[1].tolist() == [1.0, 1.0]
    assert tensors[2].tolist() == 5 * [2.0]
