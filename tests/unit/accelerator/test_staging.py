"""Stagers bring a run's tensors to the host: the same ones, unchanged by training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.accelerator import (
    CheckpointStager,
    Device,
    buffer_stager,
    host_copy_stager,
    staging,
)
from lmcore.accelerator.staging import stage_tensors
from lmcore.errors import PluginError

Tensors = dict[str, Tensor]


@pytest.fixture
def live() -> Tensors:
    """Weights, a view that is not contiguous, a scalar, bytes and nothing."""
    whole = torch.arange(24.0).view(4, 6)
    return {
        "weight": torch.randn(5, 3, requires_grad=True).mul(2.0),
        "view": whole.T[1:],
        "step": torch.tensor(3.0),
        "rng": torch.get_rng_state(),
        "half": torch.ones(4, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
    }


def make(name: str, device: Device) -> CheckpointStager:
    """Return one of the core's stagers."""
    return host_copy_stager() if name == "host-copy" else buffer_stager(device)


@pytest.mark.parametrize("name", ["host-copy", "buffers", "large buffers"])
def test_copies(name: str, device: Device, live: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, values, shapes and dtypes are the same; later changes of the run are not seen."""
    kind = name.removeprefix("large ")
    if kind != name:
        monkeypatch.setattr(staging, "_LARGE_BYTES", 0)
    stager = make(kind, device)
    assert (stager.name, stager.copies, stager.available()) == (kind, True, None)
    before = {key: tensor.detach().clone() for key, tensor in live.items()}
    staged = stage_tensors(stager, live)
    for tensor in live.values():
        tensor.detach().zero_()
    assert staged.keys() == before.keys()
    for key, tensor in staged.items():
        assert torch.equal(tensor, before[key]), key
        assert tensor.dtype == before[key].dtype
        assert not tensor.requires_grad


def test_buffers_are_used_again(device: Device, live: Tensors) -> None:
    """The second save takes no new memory, and has the second values."""
    stager = buffer_stager(device)
    first = {name: tensor.data_ptr() for name, tensor in stage_tensors(stager, live).items()}
    live["weight"] = live["weight"] + 1.0
    second = stage_tensors(stager, live)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == first
    assert torch.equal(second["weight"], live["weight"])


def test_buffers_follow_the_state(device: Device, live: Tensors) -> None:
    """A tensor of another shape or dtype gets a new buffer, one that is gone gives its own up."""
    stager = buffer_stager(device)
    stage_tensors(stager, live)
    changed = {"weight": torch.ones(2), "half": torch.ones(4), "new": torch.zeros(3)}
    staged = stage_tensors(stager, changed)
    assert all(torch.equal(staged[name], tensor) for name, tensor in changed.items())
    assert stager.stage.buffers.keys() == changed.keys()  # type: ignore[attr-defined]


def test_buffers_are_pinned_where_the_device_can(pinning: Any, live: Tensors) -> None:
    """Pinned memory is asked for once a tensor; the copies are waited for."""
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor.clone()

    waits: list[bool] = []

    def synchronize() -> None:
        waits.append(torch.equal(stager.stage.buffers["weight"], live["weight"]))  # type: ignore[attr-defined]

    stager = buffer_stager(replace(pinning(pin), synchronize=synchronize))
    stage_tensors(stager, live)
    stage_tensors(stager, live)
    assert len(pinned) == len(live)
    assert waits == [True, True]  # after the copies


def drop(tensors: Tensors) -> Tensors:
    """Lose one."""
    return {name: tensor.clone() for name, tensor in tensors.items() if name != "step"}


def narrow(tensors: Tensors) -> Tensors:
    """Change a dtype."""
    return {name: tensor.clone() for name, tensor in tensors.items()} | {
        "weight": torch.ones(5, 3).half()
    }


def reshape(tensors: Tensors) -> Tensors:
    """Change a shape."""
    return {name: tensor.clone() for name, tensor in tensors.items()} | {"weight": torch.ones(15)}


def elsewhere(tensors: Tensors) -> Tensors:
    """Leave one on another device."""
    away = tensors["weight"].to("meta")
    return {name: tensor.clone() for name, tensor in tensors.items()} | {"weight": away}


def live_ones(tensors: Tensors) -> Tensors:
    """Copy nothing."""
    return dict(tensors)


@pytest.mark.parametrize(
    "stage, why",
    [
        (drop, "did not return exactly the tensors it got: step"),
        (narrow, "it returned torch.float16 (5, 3)"),
        (reshape, "it returned torch.float32 (15,)"),
        (elsewhere, "it left `weight` on meta"),
        (live_ones, "it declares `copies`, and returned `weight` itself"),
    ],
)
def test_broken_stagers(stage: Callable[[Tensors], Tensors], why: str, live: Tensors) -> None:
    """A stager that does something else than it says writes nothing, and is named."""
    with pytest.raises(PluginError, match="`careless` did not do its work") as caught:
        stage_tensors(CheckpointStager("careless", stage), live)
    assert why in str(caught.value.why)


def test_without_a_copy(live: Tensors) -> None:
    """A stager that says so may hand out the live tensors."""
    staged = stage_tensors(CheckpointStager("in-place", live_ones, copies=False), live)
    assert staged["weight"] is live["weight"]
