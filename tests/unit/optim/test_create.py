"""Properties of all optimizers: state that resumes bitwise, and parts of parameters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmcore.config.optimizers import OPTIMIZERS
from lmcore.config.section import run_options
from lmcore.contract.torch_versions import MUON

NAMES = run_options()["optimizer"].choices or ()
ELEMENTWISE = [
    name for name, facts in OPTIMIZERS.items() if not facts.needs_whole and name != "lamb"
]
CREATED = [name for name in NAMES if name != "muon" or MUON]
"""Optimizers that the installed torch can create."""
OFTEN = {"sophiag_hessian_interval": 3, "shampoo_precondition_frequency": 3}
"""So that a few steps meet every branch."""


def test_every_choice_is_described() -> None:
    """There are facts about each choice."""
    assert tuple(OPTIMIZERS) == NAMES


@pytest.mark.parametrize("name", CREATED)
def test_goes_on_to_the_bit(bench: Any, name: str) -> None:
    """Weights and state copied into a fresh optimizer continue as if nothing had happened."""
    unbroken = bench.weights()
    bench.advance(unbroken, bench.make(name, unbroken, **OFTEN), range(10))
    first = bench.weights()
    trained = bench.make(name, first, **OFTEN)
    bench.advance(first, trained, range(5))
    trained.eval_mode()
    saved = {key: tensor.clone() for key, tensor in trained.state_tensors().items()}
    used = {key: parameter.detach().clone() for key, parameter in first.items()}
    second = bench.weights(seed=9)
    fresh = bench.make(name, second, **OFTEN)
    fresh.eval_mode()
    assert fresh.state_tensors().keys() == saved.keys()
    with torch.no_grad():
        for key, tensor in fresh.state_tensors().items():
            tensor.copy_(saved[key])
        for key, parameter in second.items():
            parameter.copy_(used[key])
    fresh.train_mode()
    bench.advance(second, fresh, range(5, 10))
    assert all(torch.equal(second[key], unbroken[key]) for key in unbroken)


@pytest.mark.parametrize("name", [*CREATED, "torch.optim:NAdam"])
@pytest.mark.parametrize("first", ["hessian", "step", "train", "eval"])
def test_a_copy_ends_before_a_change(bench: Any, name: str, first: str) -> None:
    """Each change of weights or state first lets a copy of them end, once."""
    named = bench.weights()
    optimizer = bench.make(name, named, **OFTEN)
    if first == "hessian" and optimizer.hessian_interval is None:
        return
    bench.advance(named, optimizer, range(5))

    def values() -> dict[str, Tensor]:
        live = {key: parameter.detach() for key, parameter in named.items()} | state
        return {key: tensor.clone() for key, tensor in live.items()}

    optimizer.eval_mode()
    state = optimizer.state_tensors()
    if first != "train":
        optimizer.train_mode()
    before, copies = values(), []
    optimizer.before_next_change(lambda: copies.append(values()))
    if first == "hessian":
        optimizer.update_hessian(32)
    elif first != "step":
        getattr(optimizer, f"{first}_mode")()
    optimizer.train_mode()
    bench.advance(named, optimizer, range(5, 7))
    assert len(copies) == 1
    assert all(torch.equal(copies[0][key], before[key]) for key in before)
    after = values()
    assert any(not torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("name", CREATED)
def test_a_copy_lasts_while_nothing_changes(bench: Any, name: str) -> None:
    """A validation or a save changes nothing, but for other weights, as the averaged ones."""
    optimizer = bench.make(name, bench.weights(), **OFTEN)
    calls: list[int] = []
    optimizer.eval_mode()
    optimizer.before_next_change(lambda: calls.append(1))
    optimizer.train_mode()
    assert calls == ([1] if name == "schedulefree" else [])


@pytest.mark.parametrize("name", CREATED)
def test_state_begins_as_in_every_new_run(bench: Any, name: str) -> None:
    """State is there at once, live, named KIND.PARAMETER, and counts begin at zero."""
    named = bench.weights()
    optimizer = bench.make(name, named)
    optimizer.eval_mode()
    state = optimizer.state_tensors()
    for key, tensor in state.items():
        kind, parameter = key.split(".", 1)
        assert kind
        assert parameter in named
        assert not tensor.requires_grad
        if tensor.ndim == 0:
            assert tensor == 0
    optimizer.train_mode()
    bench.advance(named, optimizer, range(4))
    optimizer.eval_mode()
    after = optimizer.state_tensors()
    assert all(after[key] is tensor for key, tensor in state.items())
    assert any(bool(tensor.any()) for tensor in after.values())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parts_move_as_the_whole_does(bench: Any, name: str) -> None:
    """Elementwise optimizers give every row the same bits wherever the parameter is cut."""
    whole = bench.weights()
    bench.advance(whole, bench.make(name, whole, **OFTEN), range(6))
    for rows in (slice(0, 11), slice(11, None)):
        parts = {key: nn.Parameter(p.detach()[rows].clone()) for key, p in bench.weights().items()}
        optimizer = bench.make(name, parts, **OFTEN)
        for step in range(6):
            if optimizer.hessian_interval and step % optimizer.hessian_interval == 0:
                for key, gradient in bench.gradients(1000 + step).items():
                    parts[key].grad = gradient[rows] * 0.01
                optimizer.update_hessian(32)
            for key, gradient in bench.gradients(step).items():
                parts[key].grad = gradient[rows]
            optimizer.step(bench.rate(step))
        for key, part in parts.items():
            torch.testing.assert_close(part, whole[key][rows], rtol=1e-6, atol=1e-7)


def test_lamb_in_parts(bench: Any) -> None:
    """With squares summed over the parts, each part moves as it does within the whole."""
    whole = bench.weights()
    wanted = bench.make("lamb", whole)
    parts = {key: nn.Parameter(p.detach()[:11].clone()) for key, p in bench.weights().items()}

    def with_the_rest(names: Sequence[str], squares: Tensor) -> Tensor:
        """Return what the whole has, of the weights first, then of the updates."""
        assert squares.shape == (len(names),)
        asked.append(list(names))
        if len(asked) % 2:
            return torch.stack([whole[name].detach().square().sum() for name in names])
        return update_squares

    asked: list[list[str]] = []
    optimizer = bench.make("lamb", parts, sum_over_shards=with_the_rest)
    for step in range(4):
        update_squares = _update_squares(bench, wanted, whole, step)
        for key, gradient in bench.gradients(step).items():
            parts[key].grad = gradient[:11]
        optimizer.step(bench.rate(step))
        bench.advance(whole, wanted, range(step, step + 1))
        for key, part in parts.items():
            torch.testing.assert_close(part, whole[key][:11], rtol=1e-5, atol=1e-6)


def _update_squares(bench: Any, optimizer: Any, whole: dict[str, Any], step: int) -> Tensor:
    """Compute the squared norms of the whole's next updates, in float64."""
    state, found = optimizer.state_tensors(), []
    for key, gradient in bench.gradients(step).items():
        if whole[key].ndim < 2:
            continue
        count = int(state[f"step.{key}"]) + 1
        first = 0.9 * state[f"exp_avg.{key}"].double() + 0.1 * gradient.double()
        second = 0.95 * state[f"exp_avg_sq.{key}"].double() + 0.05 * gradient.double() ** 2
        root = (second / (1 - 0.95**count)).sqrt() + 1e-8
        update = first / (1 - 0.9**count) / root + 0.1 * whole[key].detach().double()
        found.append(update.square().sum())
    return torch.stack(found).float()


def test_stage_without_parameters(bench: Any) -> None:
    """A process that holds nothing to train takes its step with the others."""
    for name in CREATED:
        optimizer = bench.make(name, {})
        optimizer.step(0.1)
        optimizer.eval_mode()
        assert optimizer.state_tensors() == {}


def test_plain_adam_imports_no_other() -> None:
    """A run with AdamW pays for no other optimizer, nor for torch's compiler."""
    code = """
import sys
from torch import nn
from lmcore.config.section.optimizer import OptimizerSection
from lmcore.optim.create import create_optimizer
create_optimizer(OptimizerSection(), nn.Linear(2, 2).named_parameters(), bind=lambda op: print)
print(*(name for name in sys.modules if name in ("torch._dynamo", "lmcore.optim.muon")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
