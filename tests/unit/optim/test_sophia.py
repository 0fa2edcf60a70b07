"""Sophia-G against its formula in float64, and how often it wants an estimate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


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


def test_says_how_often_it_wants_an_estimate(bench: Any) -> None:
    """The step asks; the other optimizers want none, and do not take one."""
    assert bench.make("sophia", {}, sophiag_hessian_interval=3).hessian_interval == 3
    plain = bench.make("adam", {})
    assert plain.hessian_interval is None
    with pytest.raises(NotImplementedError, match="AdamW"):
        plain.update_hessian(1)
