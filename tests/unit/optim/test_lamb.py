"""LAMB against its formula in float64, whole and in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn


def lamb(name: str, weight: Any, gradient: Any, lr: float, step: int, kept: dict[str, Any]) -> Any:
    kept["m"] = 0.9 * kept.get("m", 0.0) + 0.1 * gradient
    kept["v"] = 0.95 * kept.get("v", 0.0) + 0.05 * gradient**2
    update = kept["m"] / (1 - 0.9**step)
    update = update / (np.sqrt(kept["v"] / (1 - 0.95**step)) + 1e-6)
    if weight.ndim < 2:
        return weight - lr * update
    update = update + 0.1 * weight
    return weight - lr * np.linalg.norm(weight) / np.linalg.norm(update) * update


def test_matches_the_formula(bench: Any) -> None:
    """Matrices move by their own norm times the rate; vectors as with Adam, without decay."""
    bench.check("lamb", lamb, adam_eps=1e-6)


def test_a_weight_of_zeros_still_moves(bench: Any) -> None:
    """The ratio is 1 for a weight with norm 0, which would never leave zero otherwise."""
    named = {"w": nn.Parameter(torch.zeros(4, 4))}
    optimizer = bench.make("lamb", named)
    named["w"].grad = torch.ones(4, 4)
    optimizer.step(0.5)
    torch.testing.assert_close(named["w"].detach(), torch.full((4, 4), -0.5))
