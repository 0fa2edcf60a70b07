"""State of a run, by checkpoint name; random states."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lmcore.config.derived.layout import ParallelLayout
from lmcore.parallel.random_states import random_states, seed_everything, set_random_states
from lmcore.parallel.tensor_layout import TensorLayout
from lmcore.parallel.tensor_parallel import STREAM
from lmcore.runtime.launch.rank import RankInfo


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


def test_layouts(make_plan: Any, make_state: Any) -> None:
    """In one process everything is whole, whatever its shape."""
    state = make_state(make_plan("--optimizer shampoo"))
    tensors = state.tensors()
    found = state.layouts(tensors)
    assert found == {name: TensorLayout.whole(tuple(one.shape)) for name, one in tensors.items()}


def test_layouts_of_parts(make_plan: Any, make_state: Any, monkeypatch: Any) -> None:
    """Moments are divided as their parameter is, counts are whole, anything else is an error."""
    state = make_state(make_plan(""))
    name = next(one for one, _ in state.parallel.named_parameters() if one.endswith("up.weight"))
    shape = tuple(dict(state.parallel.named_parameters())[name].shape)
    layout = TensorLayout.split(shape, 0, rank=1, size=2)
    layouts = state.parallel.layouts | {name: layout}
    monkeypatch.setattr(type(state.parallel), "layouts", layouts)
    found = state.layouts(state.tensors())
    assert found[f"model.{name}"] == found[f"optimizer.exp_avg.{name}"] == layout
    assert found[f"optimizer.step.{name}"] == TensorLayout.whole(())
    with pytest.raises(AssertionError, match="cannot be divided"):
        state.layouts({f"optimizer.blocks.{name}": torch.zeros(3)})


def draws(runtime: Any, layout: ParallelLayout, step: int = 0) -> list[tuple[Any, Any]]:
    """Return each rank's draws from its own stream and its parts' stream, for a layout."""
    found = []
    for rank in range(layout.world_size):
        place = dataclasses.replace(runtime, rank=RankInfo(rank, rank, 8, 8))
        seed_everything(7, place, layout, step=step)
        own, parts = tuple(torch.rand(4).tolist()), None
        if STREAM in runtime.rng.names:
            with runtime.rng.fork(STREAM):
                parts = tuple(torch.rand(4).tolist())
        found.append((own, parts))
    return found


def test_seeds_of_a_layout(runtime: Any) -> None:
    """Processes with the same activations draw alike; their parts, and all others, differ."""
    before = runtime.rng.states()
    try:
        runtime.rng.add("other", 3)
        kept = runtime.rng.states()["other"]
        two = draws(runtime, ParallelLayout(tensor=2, pipeline=2, data=2))
        assert [own for own, _ in two] == [two[i // 2 * 2][0] for i in range(8)]
        numbers = [*{own for own, _ in two}, *(parts for _, parts in two)]
        assert len(numbers) == len(set(numbers)) == 12
        for layout in (
            ParallelLayout(tensor=2, sequence=True, data=4),
            ParallelLayout(context=2, pipeline=2, data=2),
            ParallelLayout(data=8, zero_stage=3),
        ):
            apart = draws(runtime, layout)
            assert len({own for own, _ in apart}) == 8
            assert {parts for _, parts in apart} == {None}
        assert torch.equal(runtime.rng.states()["other"], kept)
    finally:
        runtime.rng.set_states(before)


def test_seed_of_parts(runtime: Any) -> None:
    """It is the run's plus 2718 plus the tensor rank."""
    try:
        (_, first), (_, second) = draws(runtime, ParallelLayout(tensor=2))
        for seed, found in ((7 + 2718, first), (7 + 2719, second)):
            torch.manual_seed(seed)
            assert tuple(torch.rand(4).tolist()) == found
    finally:
        runtime.rng.set_states({})


def test_seeds_of_a_step(runtime: Any) -> None:
    """A run continued with new numbers has others than at its beginning, the same each time."""
    layout = ParallelLayout(data=3)
    found = {step: draws(runtime, layout, step) for step in (0, 1, 1000)}
    assert len({own for one in found.values() for own, _ in one}) == 9
    assert draws(runtime, layout, 1000) == found[1000]
