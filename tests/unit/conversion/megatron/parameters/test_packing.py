"""Tensor-parallel parts of a parameter, by hand: gated layers, attention, and older orders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_models import GPT, LLAMA

from lmcore.conversion.megatron.parameters.packing import Packing


def test_ranks_of_a_gated_layer_by_hand(tmp_path: Path) -> None:
    """Each rank has its rows of the gate, then its rows of the other projection."""
    packing = Packing(replace(LLAMA, ffn_hidden_size=4), ranks=2)
    gate, up = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])
    ours = torch.cat([gate, up])[:, None].expand(8, 16)
    parts = packing.split("blocks.0.feed_forward.up.weight", ours)
    assert [part[:, 0].tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert torch.equal(packing.join("blocks.0.feed_forward.up.weight", parts), ours)


def test_ranks_of_attention_by_hand() -> None:
    """Each rank has whole groups: the queries of one head of keys, that head, its values."""
    shape = replace(LLAMA, head_dim=1)
    # Queries 0..3, keys 10, 11, values 20, 21; queries 0 and 1 share keys 10.
    ours = torch.tensor([0, 1, 2, 3, 10, 11, 20, 21])[:, None].expand(8, 16)
    parts = Packing(shape, ranks=2).split("blocks.0.attention.qkv.weight", ours)
    assert [part[:, 0].tolist() for part in parts] == [[0, 1, 10, 20], [2, 3, 11, 21]]


@pytest.mark.parametrize(
    "version, rows",
    [
        # One rank's rows for 2 heads of 2 channels: q0 q1 of head 0 are 0 1, of head 1 2 3.
        (0, [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]),
        (1.0, [0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23]),
        (2.0, [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]),
        (3.0, [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]),
    ],
)
def test_orders_of_older_versions_by_hand(version: float, rows: list[int]) -> None:
    """Versions 0 and 1.0 order queries, keys and values differently on each rank."""
    shape = replace(GPT, num_attention_heads=4, num_query_groups=4, head_dim=2)
    first = torch.tensor(rows)
    parts = [first, first + 100]
    joined = Packing(shape, 2, version).join("blocks.0.attention.qkv.bias", parts)
    heads = [0, 1, 2, 3, 100, 101, 102, 103]
    assert joined.tolist() == [base + row for base in (0, 10, 20) for row in heads]
