"""Recompute policies change memory and nothing else; what would change more is refused."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.base.errors import DeviceError, RunError
from lmcore.contract import (
    Device,
    RecomputePolicy,
    RngTracker,
    full_offload_policy,
    full_policy,
    none_policy,
    offload_policy,
    selective_policy,
    standard_recompute_policies,
)
from lmcore.contract import activation_saving as module
from lmcore.contract.activation_saving import recompute
from lmcore.contract.recompute import Placement, remembering

Observed = dict[str, Tensor]


@pytest.fixture
def rng(device: Device) -> RngTracker:
    """The device's tracker, with a separate stream for attention."""
    tracker = device.rng_tracker()
    tracker.add("attention", 5)
    return tracker


class Drop(nn.Module):
    """Two projections with dropout, one of them from a stream."""

    def __init__(self, rng: RngTracker) -> None:
        super().__init__()
        self.rng = rng
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x_BH: Tensor) -> Tensor:
        with self.rng.fork("attention"):
            inner = functional.dropout(self.up(x_BH), 0.5)
        noise = torch.rand(6)  # drawn from the generator itself
        return x_BH + functional.dropout(self.down(torch.tanh(inner)), 0.5) * noise


def observe(
    rng: RngTracker,
    run: Callable[..., Tensor],
    context: Callable[[], Any] = nullcontext,
    layers: int = 3,
) -> Observed:
    """Return loss, gradients and the numbers drawn afterwards, of some layers under *run*."""
    torch.manual_seed(0)
    blocks = [Drop(rng) for _ in range(layers)]
    x = torch.randn(4, 6).requires_grad_()
    rng.set_states({})
    rng.add("attention", 5)
    remember = remembering(rng, context)
    hidden = x
    with context():
        for block in blocks:
            hidden = run(block, hidden, remember=remember)
        loss = hidden.float().square().sum()
    after_forward = torch.rand(3)
    loss.backward()
    found = {"loss": loss.detach(), "x": x.grad, "drawn": after_forward, "after": torch.rand(3)}
    found |= {"stream": rng.states()["attention"]}
    for index, block in enumerate(blocks):
        found |= {f"{index}.{name}": p.grad for name, p in block.named_parameters()}
    return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}


def plainly(call: Callable[..., Tensor], *tensors: Tensor, **_: Any) -> Tensor:
    """Call it."""
    return call(*tensors)


def assert_equal(expected: Observed, found: Observed) -> None:
    """Bit for bit."""
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("low", [False, True])
def test_full_is_exact(rng: RngTracker, low: bool) -> None:
    """Loss, gradients, later numbers and streams match a plain run, under autocast too."""

    def context() -> Any:
        return torch.autocast("cpu", torch.bfloat16) if low else nullcontext()

    run = full_policy().block
    assert run is not None
    assert_equal(observe(rng, plainly, context), observe(rng, run, context))


def test_nested(rng: RngTracker) -> None:
    """A part that is recomputed within a part that is recomputed gives the same numbers."""

    def outer(call: Callable[..., Tensor], *tensors: Tensor, remember: Any) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            x = recompute(call, x, remember=remember)
            return functional.dropout(x, 0.5)

        return recompute(inner, *tensors, remember=remember)

    def plain(call: Callable[..., Tensor], x: Tensor, **_: Any) -> Tensor:
        return functional.dropout(call(x), 0.5)

    assert_equal(observe(rng, plain), observe(rng, outer))


def test_a_context_of_a_vendor_is_entered_again(rng: RngTracker) -> None:
    """The second call runs within the precision's context, whatever that is."""
    scale = [1.0]

    @contextlib.contextmanager
    def doubling() -> Any:
        scale[0] = 2.0
        try:
            yield
        finally:
            scale[0] = 1.0

    x = torch.ones(3, requires_grad=True)
    with doubling():
        loss = recompute(
            lambda t: (t * scale[0]).exp().square(), x, remember=remembering(rng, doubling)
        ).sum()
    loss.backward()
    expected = 4 * torch.exp(torch.tensor(4.0))
    torch.testing.assert_close(x.grad, expected.expand(3))
    assert scale == [1.0]


def counting(calls: list[str]) -> Callable[[Tensor], Tensor]:
    """Return a block that notes what it gets to."""

    def block(x: Tensor) -> Tensor:
        calls.append("begin")
        y = torch.exp(x)  # keeps its result
        calls.append("end")
        return y + 1.0  # keeps nothing

    return block


def test_it_is_called_again_only_in_backward_and_only_as_far_as_needed(rng: RngTracker) -> None:
    """The second call ends where everything kept is there; without gradients there is none."""
    calls: list[str] = []
    remember = remembering(rng, nullcontext)
    x = torch.ones(2, requires_grad=True)
    loss = recompute(counting(calls), x, remember=remember).sum()
    assert calls == ["begin", "end"]
    loss.backward()
    assert calls == ["begin", "end", "begin"]
    with torch.no_grad():
        recompute(counting(calls), x, remember=remember)
    assert calls == ["begin", "end", "begin", "begin", "end"]


def test_only_inputs_are_kept(rng: RngTracker) -> None:
    """Between forward and backward no tensor of the block is alive but its input and output."""
    alive: list[Any] = []

    def block(x: Tensor) -> Tensor:
        import weakref

        inner = torch.exp(x)
        alive.append(weakref.ref(inner.untyped_storage()))
        return inner.square().sum()

    x = torch.ones(8, requires_grad=True)
    kept = block(x)
    loss = recompute(block, x, remember=remembering(rng, nullcontext))
    gc.collect()
    assert [reference() is not None for reference in alive] == [True, False]
    (kept + loss).backward()


def test_backward_twice(rng: RngTracker) -> None:
    """A graph that is retained gives the same gradients again."""
    x = torch.linspace(-1, 1, 6).requires_grad_()
    remember = remembering(rng, nullcontext)
    loss = recompute(lambda t: functional.dropout(t.exp(), 0.5), x, remember=remember).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_a_block_that_differs_is_an_error(rng: RngTracker) -> None:
    """Another shape, and less than before, are reported; no wrong gradient comes out."""
    for change in (lambda t: t[:2].exp(), lambda t: t + 1.0):
        calls: list[int] = []

        def block(x: Tensor, calls: list[int] = calls, change: Any = change) -> Tensor:
            calls.append(1)
            return (x.exp() if len(calls) == 1 else change(x)).sum()

        x = torch.ones(3, requires_grad=True)
        loss = recompute(block, x, remember=remembering(rng, nullcontext))
        with pytest.raises(RunError, match="something else when it was computed again"):
            loss.backward()


def test_an_error_in_the_block_stays_itself(rng: RngTracker) -> None:
    """An exception of a block is raised unchanged, in forward and in backward."""
    calls: list[int] = []

    def block(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("the second time")
        return x.exp()

    loss = recompute(
        block, torch.ones(1, requires_grad=True), remember=remembering(rng, nullcontext)
    )
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="the second time"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_offload_is_exact_and_uses_pinned_memory(
    rng: RngTracker, pinning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept tensors wait in buffers that the device pinned, which are used again step by step."""
    monkeypatch.setattr(module, "_SMALLEST_MOVED", 1)
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    for make in (offload_policy, full_offload_policy):
        policy = make(pinning(pin))
        assert policy.available() is None
        expected = observe(rng, plainly)
        pinned.clear()
        assert policy.block is not None
        assert_equal(expected, observe(rng, policy.block))
        first = len(pinned)
        assert first >= 2
        assert_equal(expected, observe(rng, policy.block))
        gc.collect()
        assert len(pinned) == first, "buffers were not used again"
        assert_equal(expected, observe(rng, policy.block))
        assert len(pinned) == first


def test_full_offload_moves_less_than_offload(
    rng: RngTracker, pinning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recomputation only the inputs of layers are moved: one for each of the three layers."""
    monkeypatch.setattr(module, "_SMALLEST_MOVED", 1)
    moved: dict[str, int] = {}
    for make in (offload_policy, full_offload_policy):
        sizes: list[int] = []

        def pin(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor.clone()

        policy = make(pinning(pin))
        assert policy.block is not None
        observe(rng, policy.block)
        moved[policy.name] = sum(sizes)
    # The first layer's input is a leaf of the graph, like a weight: it is there anyway.
    assert moved["full-offload"] == 2 * 4 * 6 * 4
    assert moved["offload"] > 3 * moved["full-offload"]


def test_offload_keeps_weights_and_small_tensors(pinning: Any) -> None:
    """Weights, their transposes and what is smaller than a copy is worth stay where they are."""
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor.clone()

    run = offload_policy(pinning(pin)).block
    assert run is not None
    weight = torch.ones(256, 256, requires_grad=True)
    x = torch.ones(256, 256).mul(1.0)
    run(lambda t: (t[:1] @ weight.T).sum(), x, remember=None).backward()
    assert pinned == []
    run(lambda t: (t @ weight.T).sum(), x, remember=None).backward()
    assert [tensor.nbytes for tensor in pinned] == [256 * 256 * 4]


def test_offload_says_why_it_cannot(device: Device) -> None:
    """On a device without pinned memory the reason is the device's own."""
    for policy in (offload_policy(device), full_offload_policy(device)):
        reason = str(policy.available())
        assert reason.startswith("device `cpu` has no pinned host memory")
        assert reason.endswith("(a test's device)")


def test_standard_policies(device: Device, pinning: Any) -> None:
    """Every standard policy that a device can run is exact on it, and describes itself."""
    names = [policy.name for policy in standard_recompute_policies(device)]
    assert names == ["none", "selective", "full", "offload", "full-offload"]
    parts = {}
    for policy in standard_recompute_policies(pinning(lambda tensor: tensor.clone())):
        assert policy.available() is None
        policy.verify(device)
        said = policy.describe()
        assert said["summary"]
        parts[said["name"]] = said["applies_to"]
    assert parts == {
        "none": [],
        "selective": ["attention"],
        **{name: ["layers"] for name in ("full", "offload", "full-offload")},
    }
    assert selective_policy().block is None
    assert none_policy().block is none_policy().attention is None


def forgets(call: Callable[..., Tensor], *tensors: Tensor, remember: Any) -> Tensor:
    """Recompute without restoring random numbers."""
    return recompute(call, *tensors, remember=lambda: nullcontext)


def disturbs(call: Callable[..., Tensor], *tensors: Tensor, remember: Any) -> Tensor:
    """Draw a number that a plain run does not draw."""
    torch.rand(1)
    return call(*tensors)


def rounds(call: Callable[..., Tensor], *tensors: Tensor, remember: Any) -> Tensor:
    """Lose digits of the input."""
    return call(*(tensor.bfloat16().float() for tensor in tensors))


@pytest.mark.parametrize(
    "run, differs", [(forgets, "gradients"), (disturbs, "loss"), (rounds, "loss")]
)
@pytest.mark.parametrize("part", ["block", "attention"])
def test_verify_refuses_what_is_not_exact(
    device: Device, run: Any, differs: str, part: str
) -> None:
    """A policy that changes more than memory does not start a run; nothing drawn is disturbed."""
    policy = RecomputePolicy("careless", "is careless", **{part: run})
    torch.manual_seed(1)
    with pytest.raises(DeviceError, match="recompute `careless` is not exact") as caught:
        policy.verify(device)
    assert f"has other {differs} than without it" in str(caught.value.why)
    first = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(3))


def test_verify_refuses_a_repetition_in_another_precision(device: Device) -> None:
    """A policy that forgets the precision's context is exact without autocast alone."""

    def forgetful(call: Any, *tensors: Tensor, remember: Any) -> Any:
        again = remember()

        @contextlib.contextmanager
        def without_autocast() -> Any:
            with again(), torch.autocast(device.type, enabled=False):
                yield

        return recompute(call, *tensors, remember=lambda: without_autocast)

    policy = RecomputePolicy("forgetful", "forgets the precision", forgetful)
    with pytest.raises((DeviceError, RunError)) as caught:
        policy.verify(device)
    assert "bfloat16" in str(caught.value.why)


@pytest.mark.parametrize(
    "placement, groups",
    [
        (Placement(), [(i, i + 1, True) for i in range(8)]),
        (Placement("uniform", 4), [(0, 4, True), (4, 8, True)]),
        (Placement("uniform", 3), [(0, 3, True), (3, 6, True), (6, 8, True)]),
        (Placement("uniform", 20), [(0, 8, True)]),
        (Placement("block", 5), [(i, i + 1, i < 5) for i in range(8)]),
        (Placement("block", 20), [(i, i + 1, True) for i in range(8)]),
    ],
)
def test_placement(placement: Placement, groups: list[Any]) -> None:
    """Of 8 layers: uniform by 4 keeps 2 inputs, block 5 keeps 5, as upstream's flags mean it."""
    assert placement.groups(8) == groups
