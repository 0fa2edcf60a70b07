"""Schedule-free AdamW against its authors' package, and its two sets of weights."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch


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
