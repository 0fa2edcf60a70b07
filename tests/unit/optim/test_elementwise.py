"""Optimizers of single weights against formulas in float64: SGD, ADOPT, Sophia, schedule-free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import schedulefree
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


def test_adopt_matches_the_formula(bench: Any) -> None:
    """Each gradient is divided by the moment of the steps before, clipped, then averaged."""
    bench.check("adopt", adopt, adam_eps=1e-6)


def test_first_step_of_adopt_changes_no_weight(bench: Any) -> None:
    """It gives the second moment its first value, decay included."""
    named, before = bench.weights(), bench.weights()
    optimizer = bench.make("adopt", named)
    bench.advance(named, optimizer, range(1))
    assert all(torch.equal(named[name], before[name]) for name in named)
    squares = optimizer.state_tensors()["exp_avg_sq.blocks.0.up.weight"]
    assert torch.equal(squares, bench.gradients(0)["blocks.0.up.weight"] ** 2)


def test_matches_the_authors_package(bench: Any) -> None:
    """Ten steps agree in both sets of weights, those to train and those to use."""
    ours, theirs = bench.weights(), bench.weights()
    optimizer = bench.make("schedulefree", ours)
    oracle = schedulefree.AdamWScheduleFree(
        [
            {"params": [p for p in theirs.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in theirs.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    oracle.train()
    for step in range(10):
        bench.advance(ours, optimizer, range(step, step + 1))
        for name, gradient in bench.gradients(step).items():
            theirs[name].grad = gradient.clone()
        for group in oracle.param_groups:
            group["lr"] = bench.rate(step)
        oracle.step()
    trained = {name: p.detach().clone() for name, p in ours.items()}
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=2e-6)
    optimizer.eval_mode()
    oracle.eval()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=2e-6)
    assert any(not torch.equal(ours[name], trained[name]) for name in ours)


def test_a_look_at_the_average_leaves_no_trace(bench: Any) -> None:
    """Training continues with the same bits after `eval_mode` and `train_mode`, twice included."""
    looked, plain = bench.weights(), bench.weights()
    first, second = bench.make("schedulefree", looked), bench.make("schedulefree", plain)
    for step in range(6):
        first.eval_mode()
        first.eval_mode()
        first.train_mode()
        first.train_mode()
        bench.advance(looked, first, range(step, step + 1))
        bench.advance(plain, second, range(step, step + 1))
    assert all(torch.equal(looked[name], plain[name]) for name in plain)


def test_state_is_that_of_the_weights_to_use(bench: Any) -> None:
    """A checkpoint of weights in training would be another run's: it is refused."""
    optimizer = bench.make("schedulefree", bench.weights())
    with pytest.raises(AssertionError, match="eval_mode"):
        optimizer.state_tensors()


def test_weights_without_state_begin_again(bench: Any) -> None:
    """Weights that were loaded alone are where all three sequences begin."""
    named, loaded = bench.weights(), bench.weights(seed=2)
    optimizer = bench.make("schedulefree", named)
    optimizer.eval_mode()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(loaded[name])
    optimizer.train_mode()
    assert all(torch.equal(named[name], loaded[name]) for name in named)
    bench.advance(named, optimizer, range(4))
    bench.advance(loaded, bench.make("schedulefree", loaded), range(4))
    assert all(torch.equal(named[name], loaded[name]) for name in named)


def test_rate_of_zero(bench: Any) -> None:
    """A first step at rate 0 moves nothing and divides by nothing."""
    named, before = bench.weights(), bench.weights()
    optimizer = bench.make("schedulefree", named)
    for name, gradient in bench.gradients(0).items():
        named[name].grad = gradient
    optimizer.step(0.0)
    for name in named:
        torch.testing.assert_close(named[name], before[name], rtol=1e-6, atol=1e-7)


def test_sophia_matches_the_formula(bench: Any) -> None:
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
