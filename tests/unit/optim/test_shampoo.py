"""Shampoo against its formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmcore.optim.shampoo import inverse_root

EPS = 1e-3


def power(matrix: Any) -> Any:
    values, vectors = np.linalg.eigh(matrix)
    return vectors @ np.diag((values + EPS) ** -0.25) @ vectors.T


def test_root() -> None:
    """The root, four times on itself, and the matrix with epsilon make the identity."""
    generator = torch.Generator().manual_seed(3)
    factor = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.T
    root = inverse_root(matrix, 1e-2)
    fourth = root @ root @ root @ root
    identity = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(fourth @ (matrix + 1e-2 * identity), identity)


def test_root_of_what_rounding_made_negative() -> None:
    """Eigenvalues a little below zero give finite roots."""
    matrix = torch.diag(torch.tensor([4.0, 1.0, -1e-7]))
    assert torch.isfinite(inverse_root(matrix, 1e-12)).all()


def test_matches_the_formula(bench: Any) -> None:
    """Blocks of at most 48, roots every 3 steps, Adam's length; Adam alone before the first."""
    statistics: dict[tuple[str, int, int], list[Any]] = {}

    def shampoo(
        name: str, weight: Any, gradient: Any, lr: float, step: int, kept: dict[str, Any]
    ) -> Any:
        kept["m"] = 0.9 * kept.get("m", 0.0) + 0.1 * gradient
        kept["v"] = 0.95 * kept.get("v", 0.0) + 0.05 * gradient**2
        momentum = kept["m"] / (1 - 0.9**step)
        direction = momentum / (np.sqrt(kept["v"] / (1 - 0.95**step)) + 1e-8)
        if name.startswith("blocks") and weight.ndim == 2:
            for top in range(0, weight.shape[0], 48):
                for left in range(0, weight.shape[1], 48):
                    at = np.s_[top : top + 48, left : left + 48]
                    block = gradient[at]
                    one = statistics.setdefault((name, top, left), [0.0, 0.0, None, None])
                    one[0] = 0.95 * one[0] + 0.05 * block @ block.T
                    one[1] = 0.95 * one[1] + 0.05 * block.T @ block
                    if step % 3 == 0:
                        one[2:] = [power(side / (1 - 0.95**step)) for side in one[:2]]
                    if step >= 3:
                        turned = one[2] @ momentum[at] @ one[3]
                        length = np.linalg.norm(direction[at]) / np.linalg.norm(turned)
                        direction[at] = turned * length
        decay = 0.1 * weight if weight.ndim >= 2 else 0.0
        return weight - lr * (direction + decay)

    bench.check(
        "shampoo",
        shampoo,
        shampoo_eps=EPS,
        shampoo_max_preconditioner_dim=48,
        shampoo_precondition_frequency=3,
        steps=8,
        tolerance=2e-5,
    )
    assert len(statistics) == 2 * 2 + 2 * 1


def test_a_gradient_of_zeros(bench: Any) -> None:
    """It leaves finite weights, though the preconditioned direction has no length."""
    named = bench.weights()
    optimizer = bench.make("shampoo", named, shampoo_precondition_frequency=1)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    optimizer.step(0.1)
    assert all(torch.isfinite(parameter).all() for parameter in named.values())
