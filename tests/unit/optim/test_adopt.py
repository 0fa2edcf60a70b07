"""ADOPT against its formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def adopt(name: str, weight: Any, gradient: Any, lr: float, step: int, kept: dict[str, Any]) -> Any:
    if step == 1:
        kept["m"], kept["v"] = 0.0, gradient**2
        return weight
    if weight.ndim >= 2:
        weight = weight * (1 - lr * 0.1)
    limit = (step - 1) ** 0.25
    normed = np.clip(gradient / np.maximum(np.sqrt(kept["v"]), 1e-6), -limit, limit)
    kept["m"] = 0.9 * kept["m"] + 0.1 * normed
    kept["v"] = 0.95 * kept["v"] + 0.05 * gradient**2
    return weight - lr * kept["m"]


def test_matches_the_formula(bench: Any) -> None:
    """Each gradient is divided by the moment of the steps before, clipped, then averaged."""
    bench.check("adopt", adopt, adam_eps=1e-6)


def test_first_step_changes_no_weight(bench: Any) -> None:
    """It gives the second moment its first value, decay included."""
    named, before = bench.weights(), bench.weights()
    optimizer = bench.make("adopt", named)
    bench.advance(named, optimizer, range(1))
    assert all(torch.equal(named[name], before[name]) for name in named)
    squares = optimizer.state_tensors()["exp_avg_sq.blocks.0.up.weight"]
    assert torch.equal(squares, bench.gradients(0)["blocks.0.up.weight"] ** 2)
