"""SGD against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_matches_torch(bench: Any, momentum: float) -> None:
    """Ten steps with decay agree with torch's SGD to the last bits."""
    ours, theirs = bench.weights(), bench.weights()
    optimizer = bench.make("sgd", ours, sgd_momentum=momentum)
    oracle = torch.optim.SGD(
        [
            {"params": [p for p in theirs.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in theirs.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1.0,
        momentum=momentum,
    )
    for step in range(10):
        bench.advance(ours, optimizer, range(step, step + 1))
        for name, gradient in bench.gradients(step).items():
            theirs[name].grad = gradient
        for group in oracle.param_groups:
            group["lr"] = bench.rate(step)
        oracle.step()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-6, atol=1e-6)
    assert bool(optimizer.state_tensors()) == (momentum > 0)


def test_gradients_stay(bench: Any) -> None:
    """A step leaves the gradients as they were: they may be looked at afterwards."""
    named = bench.weights()
    bench.advance(named, bench.make("sgd", named), range(3))
    for name, gradient in bench.gradients(2).items():
        assert torch.equal(named[name].grad, gradient)
