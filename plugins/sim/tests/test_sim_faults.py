"""Injected faults of the device: each has its effect, and no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import pytest
import torch


def test_an_op_fails_at_its_call(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """The named op raises at the named call, before it changes anything."""
    x = torch.ones(3, device="sim")
    misbehave("fail:add@2")
    x.add_(1)
    x.mul_(1)
    with pytest.raises(RuntimeError, match="add failed, as LMCORE_SIM_FAULTS told it to"):
        x.add_(1)
    x.add_(1)
    assert x.tolist() == [3, 3, 3]


def test_any_op_fails_at_a_count(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """Without a target every op counts."""
    x = torch.ones(3, device="sim")
    misbehave("fail@3")
    y = x.exp().log()
    with pytest.raises(RuntimeError, match="sin failed"):
        y.sin()


def test_results_are_wrong(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """A wrong result is off by its factor: returned, written in place, or in a list."""
    x = torch.ones(3, device="sim")
    misbehave("wrong:exp=2;wrong:_foreach_add=3")
    assert torch.allclose(x.log().exp(), torch.full((3,), 2.0, device="sim"))
    assert torch.allclose(x.log().exp_(), torch.full((3,), 2.0, device="sim"))
    assert x.tolist() == [1, 1, 1]
    misbehave("wrong:mul=3")
    torch._foreach_mul_([x], 1.0)
    assert x.tolist() == [3, 3, 3]


def test_backward_can_be_wrong_alone(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """A target may be an op of the backward pass."""
    results = []
    for text in ("", "wrong:gelu_backward=1.5"):
        misbehave(text)
        x = torch.ones(3, device="sim", requires_grad=True)
        y = torch.nn.functional.gelu(x)
        y.sum().backward()
        assert x.grad is not None
        results.append((y.detach().cpu(), x.grad.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1] * 1.5, results[1][1])


def test_ops_are_slow(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """A slow op takes the given time, and its result is right."""
    x = torch.ones(3, device="sim")
    misbehave("slow:exp=30ms")
    begin = time.perf_counter()
    assert x.log().exp().tolist() == [1, 1, 1]
    assert time.perf_counter() - begin >= 0.03


def test_the_device_is_lost(sim: ModuleType, misbehave: Callable[[str], None]) -> None:
    """From the loss on everything raises torch's error for it, in each thread."""
    x = torch.ones(3, device="sim")
    misbehave("lose:exp")
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        x.exp()
    for use in (
        lambda: x + 1,
        x.cpu,
        sim.synchronize,
        lambda: torch.ones(1, device="sim"),
    ):
        with pytest.raises(torch.AcceleratorError, match="is lost"):
            use()


def test_states_that_are_put_back_are_ignored(
    sim: ModuleType, misbehave: Callable[[str], None]
) -> None:
    """With `no-rng-restore` a restored generator continues where it was."""
    state = sim.get_rng_state()
    first = torch.rand(4, device="sim")
    misbehave("no-rng-restore")
    sim.set_rng_state(state)
    assert not torch.equal(torch.rand(4, device="sim"), first)
    misbehave("")
    sim.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="sim"), first)


def test_ops_are_counted(sim: ModuleType) -> None:
    """The count by which a fault finds its op grows by one for each, and by none for views."""
    from lmcore_sim import _C

    x = torch.ones(4, device="sim")
    before = _C.num_ops()
    x.view(2, 2).t()
    assert _C.num_ops() == before
    x.exp()
    assert _C.num_ops() == before + 1
