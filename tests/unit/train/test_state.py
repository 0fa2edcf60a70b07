"""What a run changes, by checkpoint name; random states."""

from __future__ import annotations

from typing import Any

import torch

from lmcore.train.state import random_states, seed_everything, set_random_states


def test_tensors(make_plan: Any, make_state: Any) -> None:
    """Every weight once, and three optimizer tensors a weight; they are the live ones."""
    state = make_state(make_plan(""))
    names = [name for name, _ in state.model.named_parameters()]
    tensors = state.tensors()
    assert set(tensors) == {f"model.{name}" for name in names} | {
        f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in names
    }
    assert set(state.tensors(optimizer=False)) == {f"model.{name}" for name in names}
    tensors["model.final_norm.bias"].fill_(3.0)
    assert bool((state.model.final_norm.bias == 3.0).all())
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_fresh_counters(make_plan: Any, make_state: Any) -> None:
    """A run begins at zero with the plan's schedule."""
    state = make_state(make_plan("--lr 2e-4 --lr-warmup-iters 3"))
    assert set(state.counters().values()) == {0}
    assert state.schedule_settings() == {
        "style": "cosine",
        "highest": 2e-4,
        "lowest": 0.0,
        "warmup_samples": 12,
        "decay_samples": 32,
        "cooldown_fraction": 0.2,
    }


def test_random_states(runtime: Any) -> None:
    """States put back repeat the numbers drawn after they were taken; they are copies."""
    seed_everything(5, runtime)
    torch.rand(3)
    states = random_states(runtime)
    first = torch.rand(4)
    torch.rand(100)
    set_random_states(states, runtime)
    assert torch.equal(torch.rand(4), first)


def test_streams(runtime: Any) -> None:
    """Streams are among the states, by name; without streams nothing is added."""
    seed_everything(5, runtime)
    assert set(random_states(runtime)) == {"rng.host", "rng.device"}
    try:
        runtime.rng.add("experts", 3)
        states = random_states(runtime)
        assert set(states) == {"rng.host", "rng.device", "rng.stream.experts"}
        with runtime.rng.fork("experts"):
            first = torch.rand(4)
        set_random_states(states, runtime)
        with runtime.rng.fork("experts"):
            assert torch.equal(torch.rand(4), first)
    finally:
        runtime.rng.set_states({})


def test_seed(runtime: Any) -> None:
    """A seed decides all that is drawn after it."""
    drawn = []
    for seed in (1, 1, 2):
        seed_everything(seed, runtime)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
