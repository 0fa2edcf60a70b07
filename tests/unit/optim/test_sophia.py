"""Sophia-G against its formula in float64, and when it asks for an estimate."""

from __future__ import annotations

from typing import Any

import numpy as np


def test_matches_the_formula(bench: Any) -> None:
    """Momentum by curvature, each entry clipped at 1, after decay; an estimate every 3 steps."""
    clipped: list[float] = []

    def sophia(
        name: str, weight: Any, gradient: Any, lr: float, step: int, kept: dict[str, Any]
    ) -> Any:
        if step % 3 == 1:
            sampled = bench.gradients(1000 + step - 1)[name].numpy().astype(np.float64) * 0.01
            kept["h"] = 0.99 * kept.get("h", 0.0) + 0.01 * 32 * sampled**2
        kept["m"] = 0.965 * kept.get("m", 0.0) + 0.035 * gradient
        if weight.ndim >= 2:
            weight = weight * (1 - lr * 0.1)
        move = kept["m"] / np.maximum(40.0 * kept["h"], 1e-15)
        clipped.append(float((np.abs(move) > 1).mean()))
        return weight - lr * np.clip(move, -1, 1)

    bench.check("sophia", sophia, sophiag_rho=40.0, sophiag_hessian_interval=3, tolerance=2e-5)
    assert 0.05 < np.mean(clipped) < 0.95, "both branches of the clipping are compared"


def test_asks_for_curvature_before_the_first_step_and_then_by_interval(bench: Any) -> None:
    """Without an estimate every entry would be clipped, so there is one from the beginning."""
    named = bench.weights()
    optimizer = bench.make("sophia", named, sophiag_hessian_interval=3)
    asked = []
    for step in range(7):
        asked.append(optimizer.wants_curvature)
        bench.advance(named, optimizer, range(step, step + 1))
    assert asked == [True, False, False, True, False, False, True]
