"""Context parallelism: parts of sequences, equal work for causal attention, exact attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcore.contract.op.reference import attention
from lmcore.parallel import context_parallel
from lmcore.parallel.context_parallel import local_positions, local_tokens
from lmcore.parallel.mesh import Axis


def axes(size: int) -> list[Axis]:
    return [Axis(rank, size, tuple(range(size)), None) for rank in range(size)]


@given(st.integers(2, 6), st.integers(1, 5))
def test_parts_are_the_sequence(size: int, chunk: int) -> None:
    """Positions are disjoint and complete, and tokens are those at the positions."""
    length = 2 * size * chunk
    tokens_BT = torch.arange(3 * length).view(3, length) * 7
    positions = [local_positions(length, axis) for axis in axes(size)]
    assert torch.cat(positions).sort().values.tolist() == list(range(length))
    for axis, own in zip(axes(size), positions, strict=True):
        assert torch.equal(local_tokens(tokens_BT, axis), tokens_BT[:, own])


@given(st.integers(2, 6), st.integers(1, 5))
def test_work_is_equal(size: int, chunk: int) -> None:
    """All ranks have equally many pairs of a query and an earlier key."""
    length = 2 * size * chunk
    work = {int((local_positions(length, axis) + 1).sum()) for axis in axes(size)}
    assert len(work) == 1


@given(st.integers(2, 6), st.integers(1, 5))
def test_gathered_parts_are_put_in_order(size: int, chunk: int) -> None:
    """Parts in the order of ranks become the sequence."""
    length = 2 * size * chunk
    values_BT = torch.arange(2 * length).view(2, length)
    gathered = torch.cat([local_tokens(values_BT, axis) for axis in axes(size)], dim=1)
    assert torch.equal(context_parallel._in_order(gathered, axes(size)[0], dim=1), values_BT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_attention_of_parts(
    size: int, masked: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention of each rank's queries equals the whole sequence's, causal or not."""
    torch.manual_seed(0)
    length = 4 * size
    q, k, v = (torch.randn(2, 3, length, 5, dtype=torch.float64) for _ in range(3))
    documents_BT = torch.randint(0, 3, (2, length)).sort(dim=1).values
    mask = documents_BT[:, None, :, None] != documents_BT[:, None, None, :]
    whole = attention(q, k, v, causal=causal, mask=mask if masked else None)
    order = torch.cat([local_positions(length, axis) for axis in axes(size)])
    wholes: dict[int, torch.Tensor] = {}  # the tensor of all ranks, by this rank's part
    monkeypatch.setattr(
        context_parallel,
        "all_gather",
        lambda x, axis, dim=1: wholes[id(x)].index_select(dim, order),
    )
    for axis in axes(size):
        own = local_positions(length, axis)
        k_own, v_own, documents_BS = k[:, :, own], v[:, :, own], documents_BT[:, own]
        wholes |= {id(k_own): k, id(v_own): v, id(documents_BS): documents_BT}
        more = {"mask": context_parallel._document_mask(axis, documents_BS)} if masked else {}
        attend = context_parallel._Attention(attention, axis)
        found = attend(q[:, :, own], k_own, v_own, causal=causal, **more)
        assert torch.allclose(found, whole[:, :, own], atol=1e-13)
