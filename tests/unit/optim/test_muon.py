"""Muon against the formula in float64 and torch's own, and what it leaves to AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmcore.contract.torch_versions import MUON

pytestmark = pytest.mark.skipif(not MUON, reason=f"this torch has no {MUON.description}")

MATRICES = ("blocks.0.up.weight", "blocks.0.down.weight")


def orthogonal(matrix: Any) -> Any:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def muon(name: str, weight: Any, gradient: Any, lr: float, step: int, kept: dict[str, Any]) -> Any:
    if name not in MATRICES:
        kept["m"] = 0.9 * kept.get("m", 0.0) + 0.1 * gradient
        kept["v"] = 0.95 * kept.get("v", 0.0) + 0.05 * gradient**2
        root = np.sqrt(kept["v"] / (1 - 0.95**step)) + 1e-8
        decay = 0.1 if weight.ndim >= 2 else 0.0
        return weight * (1 - lr * decay) - lr * kept["m"] / (1 - 0.9**step) / root
    kept["b"] = 0.95 * kept.get("b", 0.0) + 0.05 * gradient
    update = orthogonal(0.05 * gradient + 0.95 * kept["b"])
    return weight * (1 - lr * 0.1) - lr * 0.2 * np.sqrt(max(weight.shape)) * update


def test_matches_the_formula(bench: Any) -> None:
    """Within the rounding of bfloat16, in which the iteration runs."""
    bench.check("muon", muon, steps=5, tolerance=2.5e-4)


def test_matrices_match_torch_to_the_bit(bench: Any) -> None:
    """Muon is torch's class; groups, rates and state change nothing of it."""
    ours, theirs = bench.weights(), bench.weights()
    optimizer = bench.make("muon", ours, muon_nesterov=False, muon_num_ns_steps=3)
    oracle = torch.optim.Muon(
        [theirs[name] for name in MATRICES],
        nesterov=False,
        ns_steps=3,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(4):
        bench.advance(ours, optimizer, range(step, step + 1))
        for name, gradient in bench.gradients(step).items():
            theirs[name].grad = gradient
        oracle.param_groups[0]["lr"] = bench.rate(step)
        oracle.step()
    for name in MATRICES:
        assert torch.equal(ours[name], theirs[name])


def test_state_is_of_one_half_each(bench: Any) -> None:
    """Matrices have a momentum, embeddings and vectors the moments of AdamW."""
    names = set(bench.make("muon", bench.weights()).state_tensors())
    assert {name for name in names if name.startswith("momentum_buffer.")} == {
        f"momentum_buffer.{name}" for name in MATRICES
    }
    assert "exp_avg.token_embedding.weight" in names
    assert not any(name.startswith("exp_avg.blocks.0.up.weight") for name in names)
