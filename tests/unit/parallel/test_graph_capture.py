"""Graph capture and replay of forward and backward, by a graph of CPU ops in Python."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmcore.base.errors import DeviceError
from lmcore.contract import Device
from lmcore.parallel.graph_capture import GraphedMicroBatch, allocate_gradients, require_graphs


class Graph(TorchDispatchMode):
    """Graph of CPU ops: replay writes results to the tensors of the capture.

    Unlike a device, the CPU runs the ops while capturing, so what they wrote is restored.
    """

    def __init__(self, written: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.written = written
        self.broken = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            self.broken = True
            raise RuntimeError("the host waits")
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out

    def capture_begin(self) -> None:
        self.before = [(one, one.clone()) for one in self.written()]
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for one, value in self.before:
            one.copy_(value)
        if self.broken:
            raise RuntimeError("the capture is of no use")

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.steps:
            found = func(*args, **kwargs)
            for was, now in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(was, Tensor) and was.data_ptr() != now.data_ptr():
                    was.copy_(now)


class Stream(contextlib.nullcontext[None]):
    """The one queue of the CPU."""

    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture
def make(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Factory of graphed micro-batches, on a CPU that can capture."""
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    parameters = list(model.parameters())

    def written() -> list[Tensor]:
        return [one.grad for one in parameters if one.grad is not None]

    device = Device.from_torch("cpu", new_graph=lambda: Graph(written), new_stream=Stream)
    allocate = functools.partial(allocate_gradients, parameters)
    return lambda run: GraphedMicroBatch(run, parameters, device, allocate=allocate)


def batch(number: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(number)
    x_BC = torch.randn(5, 4, generator=random)
    return {"x_BC": x_BC, "weight_B": torch.rand(5, generator=random)}


def loss_of(model: nn.Module, x_BC: Tensor, weight_B: Tensor) -> Tensor:
    loss: Tensor = (model(x_BC)[:, 0].square() * weight_B).sum()
    return loss


def test_losses_and_gradients(make: Any, model: nn.Module) -> None:
    """Losses and gradients match eager execution, before and after the capture."""
    calls = []

    def run(x_BC: Tensor, *, weight_B: Tensor) -> Tensor:
        calls.append(1)
        return loss_of(model, x_BC, weight_B)

    graphed = make(run)
    for step in range(5):
        if graphed.captured:
            graphed.zero_grad()
        else:
            model.zero_grad(set_to_none=True)
        batches = [batch(2 * step), batch(2 * step + 1)]
        losses = [graphed(one, contextlib.nullcontext) for one in batches]
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        expected = [loss_of(model, **one) for one in batches]
        wanted = torch.autograd.grad(sum(expected), list(model.parameters()))
        assert torch.equal(torch.stack(losses), torch.stack(expected).detach())
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(found, wanted, strict=True))
    assert len(calls) == 4  # three warm-ups and the capture


def test_other_shapes(make: Any, model: nn.Module) -> None:
    """A graph of one shape is not replayed on another."""
    graphed = make(functools.partial(loss_of, model))
    for number in range(4):
        graphed(batch(number), contextlib.nullcontext)
    other = batch(4)
    with pytest.raises(AssertionError, match="another shape"):
        graphed(other | {"x_BC": other["x_BC"][:3]}, contextlib.nullcontext)
    with pytest.raises(AssertionError, match="other tensors"):
        graphed({"x_BC": other["x_BC"]}, contextlib.nullcontext)


def test_failed_capture(make: Any, model: nn.Module) -> None:
    """The first error is reported, not the failed end of the capture; OOM is passed on."""

    def waits(x_BC: Tensor, weight_B: Tensor) -> Tensor:
        loss = loss_of(model, x_BC, weight_B)
        loss.item()
        return loss

    graphed = make(waits)
    for number in range(3):
        graphed(batch(number), contextlib.nullcontext)
    with pytest.raises(DeviceError, match="cannot be captured") as one:
        graphed(batch(3), contextlib.nullcontext)
    assert one.value.why == "the host waits"

    def ends(x_BC: Tensor, weight_B: Tensor) -> Tensor:
        if graphed.taken_all:
            raise torch.OutOfMemoryError("no memory")
        return loss_of(model, x_BC, weight_B)

    graphed = make(ends)
    graphed.taken_all = False
    for number in range(3):
        graphed(batch(number), contextlib.nullcontext)
    graphed.taken_all = True
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        graphed(batch(3), contextlib.nullcontext)


def test_devices_without_graphs() -> None:
    """The message has the device's reason and the flag to leave out."""
    with pytest.raises(DeviceError, match="device `cpu` cannot capture graphs") as one:
        require_graphs(Device.from_torch("cpu"))
    assert "done when its call returns" in str(one.value.why)
    assert one.value.hint == "leave `--step-graph` out"
