"""AdamW against torch's, with every `adamw` kernel that the CPU has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lmcore.contract import OP_SPECS
from lmcore.contract.op.records import load_target
from lmcore.contract.weight_copies import copies_of, narrow_weight
from lmcore.optim.adamw import AdamW
from lmcore.optim.optimizer import parameter_groups
from lmcore_cpu.kernels import KERNELS

REFERENCE = next(spec.reference for spec in OP_SPECS if spec.name == "adamw")
UPDATES = {"reference": REFERENCE} | {one.id: one.load for one in KERNELS if one.op == "adamw"}
SHAPES = {"embedding.weight": (11, 6), "norm.weight": (6,), "up.weight": (6, 5), "up_bias": (5,)}


@pytest.fixture(params=UPDATES)
def update(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Each kernel in turn."""
    return load_target(UPDATES[request.param])  # type: ignore[no-any-return]


def weights(seed: int = 1) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    scale = 10.0 ** (step % 5 - 3)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


def make(named: dict[str, nn.Parameter], update: Callable[..., None], **options: Any) -> AdamW:
    groups = parameter_groups(named.items(), 0.1)
    return AdamW(groups, update, betas=(0.9, 0.95), epsilon=1e-8, **options)


def advance(named: dict[str, nn.Parameter], optimizer: AdamW, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            named[name].grad = gradient
        optimizer.step(1e-2 / (1 + step))


def test_matches_torch(update: Callable[..., None]) -> None:
    """Twenty steps of changing rates and gradient scales agree with torch to the last bits."""
    ours, theirs = weights(), weights()
    optimizer = make(ours, update)
    oracle = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in theirs.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(20):
        advance(ours, optimizer, range(step, step + 1))
        for name, gradient in gradients(step).items():
            theirs[name].grad = gradient
        for group in oracle.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        oracle.step()
    state = optimizer.state_tensors()
    for name, parameter in theirs.items():
        close: dict[str, Any] = {"rtol": 3e-6, "atol": 1e-7}
        torch.testing.assert_close(ours[name], parameter, **close)
        torch.testing.assert_close(
            state[f"exp_avg.{name}"], oracle.state[parameter]["exp_avg"], **close
        )
        torch.testing.assert_close(
            state[f"exp_avg_sq.{name}"], oracle.state[parameter]["exp_avg_sq"], **close
        )
        assert state[f"step.{name}"].item() == 20


def test_decay_falls_on_matrices_alone(update: Callable[..., None]) -> None:
    """With gradients of zero a matrix shrinks by 1 - lr * decay a step; vectors do not move."""
    named, before = weights(), weights()
    optimizer = make(named, update)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5)
    for name, parameter in named.items():
        factor = 1 - 0.5 * 0.1 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name].detach() * factor)


def test_state_round_trip(update: Callable[..., None]) -> None:
    """State copied into a fresh optimizer continues with the same bits."""
    first = weights()
    trained = make(first, update)
    advance(first, trained, range(5))
    second = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    fresh = make(second, update)
    saved = {name: tensor.clone() for name, tensor in trained.state_tensors().items()}
    for name, tensor in fresh.state_tensors().items():
        tensor.copy_(saved[name])
    advance(first, trained, range(5, 10))
    advance(second, fresh, range(5, 10))
    assert all(torch.equal(first[name], second[name]) for name in SHAPES)
    assert all(
        torch.equal(tensor, fresh.state_tensors()[name])
        for name, tensor in trained.state_tensors().items()
    )


def test_what_is_released_stays_as_it_is(update: Callable[..., None]) -> None:
    """After `release_state` a step writes elsewhere, with the bits of a step in place."""
    plain, named = weights(), weights()
    in_place, optimizer = make(plain, update), make(named, update, owns_weights=True)
    can = "results" in inspect.signature(update).parameters
    places = set()
    for step in range(0, 12, 2):
        released = optimizer.release_state()
        kinds = ("exp_avg", "exp_avg_sq") if can else ()
        assert released.parameters == (set(SHAPES) if can else set())
        assert released.state == {f"{kind}.{name}" for kind in kinds for name in SHAPES}
        state = optimizer.state_tensors()
        live = {name: state[name] for name in released.state}
        live |= {name: named[name].detach() for name in released.parameters}
        before = {name: tensor.clone() for name, tensor in live.items()}
        advance(named, optimizer, range(step, step + 2))
        advance(plain, in_place, range(step, step + 2))
        assert all(torch.equal(live[name], before[name]) for name in live)
        for name, tensor in in_place.state_tensors().items():
            assert torch.equal(optimizer.state_tensors()[name], tensor)
        assert all(torch.equal(named[name], plain[name]) for name in SHAPES)
        places |= {tensor.data_ptr() for tensor in live.values()}
    assert len(places) == (6 * len(SHAPES) if can else 0)  # two tensors of each, by turns


def test_memory_of_the_first_release(update: Callable[..., None]) -> None:
    """`prepare_release` allocates what the step after the first release needs, once."""
    named = weights()
    optimizer = make(named, update, owns_weights=True)
    for _ in range(2):
        optimizer.prepare_release()
    places = {tensor.data_ptr() for group in optimizer._spare for part in group for tensor in part}
    optimizer.release_state()
    advance(named, optimizer, range(1))
    live = {tensor.data_ptr() for tensor in named.values()}
    state = optimizer.state_tensors()
    live |= {state[name].data_ptr() for name in state if not name.startswith("step.")}
    assert places == (live if "results" in inspect.signature(update).parameters else set())


def test_what_is_not_released() -> None:
    """On a device memory is dearer than a copy; what something else keeps is not exchanged."""

    def update(*arguments: Any, results: Any = None) -> None: ...

    for device, owns in (("meta", True), ("cpu", False), ("cpu", True)):
        named = {"w": nn.Parameter(torch.zeros(3, device=device))}
        released = make(named, update, owns_weights=owns).release_state()
        assert bool(released.parameters) is bool(released.state) is (owns and device == "cpu")


def test_state_names() -> None:
    """There are two moments and a count a parameter, all zero at first."""
    state = make(weights(), load_target(REFERENCE)).state_tensors()
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert set(state) == {f"{kind}.{name}" for kind in kinds for name in SHAPES}
    assert all(not tensor.any() for tensor in state.values())
    assert state["step.up_bias"].dtype == torch.float32


def test_groups() -> None:
    """Matrices decay; biases and gains do not; a kind that is absent makes no group."""
    decayed, plain = parameter_groups(weights().items(), 0.3)
    assert (decayed.names, decayed.weight_decay) == (("embedding.weight", "up.weight"), 0.3)
    assert (plain.names, plain.weight_decay) == (("norm.weight", "up_bias"), 0.0)
    assert len(parameter_groups([("b", nn.Parameter(torch.zeros(2)))], 0.3)) == 1


def test_the_factor_of_gradients(update: Callable[..., None]) -> None:
    """`scale_gradients` is for one step, and has the bits of a product before it."""
    plain, named = weights(), weights()
    expected, optimizer = make(plain, update), make(named, update)
    for step in range(4):
        factor = (0.25, 1.0, 3.0, 1.0)[step]
        for name, gradient in gradients(step).items():
            plain[name].grad = gradient * factor
            named[name].grad = gradient.clone()
        found = [p.grad for p in named.values() if p.grad is not None]
        optimizer.scale_gradients(found, factor)
        optimizer.step(1e-2)
        expected.step(1e-2)
        assert all(torch.equal(named[name], plain[name]) for name in SHAPES), step


def test_copies_follow_the_weights(update: Callable[..., None]) -> None:
    """A copy that was asked for is written by each step, in the same memory, also on release."""
    named = weights()
    optimizer = make(named, update, owns_weights=True, copies=torch.bfloat16)
    writes = "copies" in inspect.signature(update).parameters
    matrix, vector, unused = named["up.weight"], named["norm.weight"], named["embedding.weight"]
    narrow_weight(matrix, torch.bfloat16)
    addresses = set()
    for step in range(4):
        if step == 2:
            optimizer.release_state()
        advance(named, optimizer, range(step, step + 1))
        copy = narrow_weight(matrix, torch.bfloat16)
        assert torch.equal(copy, matrix.detach().bfloat16())
        assert (copy is narrow_weight(matrix, torch.bfloat16)) == writes
        addresses.add(copy.data_ptr())
        assert narrow_weight(vector, torch.bfloat16) is not narrow_weight(vector, torch.bfloat16)
    assert len(addresses) == 1 or not writes
    assert copies_of([unused, vector]) == [None, None]
    # A weight that was loaded is cast, and the next step writes its copy again.
    with torch.no_grad():
        matrix.data.fill_(0.5)
    optimizer.train_mode()
    assert (narrow_weight(matrix, torch.bfloat16) == 0.5).all()
    advance(named, optimizer, range(4, 5))
    assert torch.equal(narrow_weight(matrix, torch.bfloat16), matrix.detach().bfloat16())


def test_no_copies_of_weights_that_others_keep(update: Callable[..., None]) -> None:
    """Weights whose memory something else keeps may change unseen."""
    named = weights()
    optimizer = make(named, update, copies=torch.bfloat16)
    narrow_weight(named["up.weight"], torch.bfloat16)
    advance(named, optimizer, range(1))
    assert copies_of(list(named.values())) == [None] * len(named)
