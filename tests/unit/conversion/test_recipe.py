"""Tests of recipes by hand-computed cases: both directions, weights and biases."""

from __future__ import annotations

import torch

from lmcore.conversion.recipe import Recipe, grouped_qkv, same, stacked, transposed


def round_trip(recipe: Recipe, tensor: torch.Tensor) -> None:
    parts = recipe.split(tensor)
    assert [tuple(part.shape) for part in parts] == list(recipe.sources.values())
    assert torch.equal(recipe.join([part.contiguous() for part in parts]), tensor)


def test_every_recipe_comes_back() -> None:
    matrix, vector = torch.randn(24, 7), torch.randn(24)
    round_trip(same("w", (24, 7)), matrix)
    round_trip(transposed("w", (24, 7)), matrix)
    round_trip(transposed("b", (24,)), vector)
    round_trip(stacked(["q", "k", "v"], [12, 6, 6], (24, 7)), matrix)
    round_trip(stacked(["gate", "up"], [12, 12], (24,)), vector)
    # 4 query heads on 2 heads of keys and values, 3 channels: (4 + 2 * 2) * 3 rows.
    round_trip(grouped_qkv("w", (24, 7), groups=2, queries=2, channels=3), matrix)
    round_trip(grouped_qkv("b", (24,), groups=2, queries=2, channels=3), vector)


def test_grouped_rows_by_hand() -> None:
    """Megatron's rows are q0 q1 k0 v0, q2 q3 k1 v1; lmcore's q0 q1 q2 q3, k0 k1, v0 v1."""
    q0, q1, q2, q3, k0, k1, v0, v1 = (torch.full((2,), float(i)) for i in range(8))
    recipe = grouped_qkv("b", (16,), groups=2, queries=2, channels=2)
    foreign = torch.cat([q0, q1, k0, v0, q2, q3, k1, v1])
    ours = torch.cat([q0, q1, q2, q3, k0, k1, v0, v1])
    assert torch.equal(recipe.join([foreign]), ours)
    assert torch.equal(recipe.split(ours)[0], foreign)


def test_every_head_has_its_own_keys() -> None:
    """Without groups Megatron's rows are q0 k0 v0, q1 k1 v1."""
    q0, q1, k0, k1, v0, v1 = (torch.full((3,), float(i)) for i in range(6))
    recipe = grouped_qkv("b", (18,), groups=2, queries=1, channels=3)
    joined = recipe.join([torch.cat([q0, k0, v0, q1, k1, v1])])
    assert torch.equal(joined, torch.cat([q0, q1, k0, k1, v0, v1]))
