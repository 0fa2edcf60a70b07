"""Stagers bring a run's tensors to the host: the same ones, unchanged by training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, PluginError
from lmcore.contract import (
    CheckpointStager,
    Device,
    PendingCopy,
    buffer_stager,
    host_copy_stager,
)
from lmcore.contract.transfer import staging_buffers as host_copies
from lmcore.contract.transfer.staging import begin_staging, stage_tensors

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
        monkeypatch.setattr(host_copies, "_SMALLEST_BYTES", 0)
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


class Stream:
    """A stream of a device that copies when an event of it is waited for; or a stream's wait."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Event) -> None:
        """Note it."""
        self.log.append(f"{self.name} waits for {event.stream}")

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"exit {self.name}")


class Event:
    """An event, which notes its calls."""

    stream = ""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self, stream: Stream) -> None:
        """Note it."""
        self.stream = stream.name
        self.log.append(f"record {stream.name}")

    def synchronize(self) -> None:
        """Note it."""
        self.log.append(f"host waits for {self.stream}")


class Distant:
    """A tensor that says that it is on a device; its copy notes the time."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype
        self.device = torch.device("meta")

    def detach(self) -> Tensor:
        """Return the tensor."""
        return self.tensor


def test_a_device_copies_on_a_separate_stream(
    pinning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is queued after the present work; the update's stream waits, the host does not."""
    log: list[str] = []
    current, side = Stream(log, "compute"), Stream(log, "copy")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _=None: current)
    device = pinning(lambda tensor: tensor.clone())
    missing = {
        name: why for name, why in device.missing.items() if name not in ("new_stream", "new_event")
    }
    device = replace(
        device,
        synchronize=lambda: log.append("device waits"),
        new_stream=lambda: side,
        new_event=lambda: Event(log),
        missing=missing,
    )
    stager = buffer_stager(device)
    assert stager.begin is not None
    values = torch.randn(5)
    live: Any = {"weight": Distant(values), "step": torch.tensor(1.0)}
    pending = stager.begin(live)
    queued = ["record compute", "copy waits for compute", "enter copy", "exit copy", "record copy"]
    assert log == queued
    pending.end_reads()
    assert log[5:] == ["compute waits for copy"]
    pending.finish()
    assert log[6:] == ["host waits for copy"]
    assert torch.equal(pending.tensors["weight"], values)
    log.clear()
    stager.begin(live)
    assert log == ["host waits for copy", *queued]  # the earlier copy into the same memory first


def test_a_device_without_streams_copies_at_once(pinning: Any) -> None:
    """Without streams and events a copy of a device cannot run beside the computation."""
    device = replace(pinning(lambda tensor: tensor), type="other")
    assert buffer_stager(device).begin is None


def test_a_copy_that_has_begun(device: Device, live: Tensors, small: None) -> None:
    """Lasting tensors are read until `end_reads`; all other tensors are copied before."""
    stager = buffer_stager(device)
    before = {key: tensor.detach().clone() for key, tensor in live.items()}
    lasting = live.keys() - {"rng"}
    pending = begin_staging(stager, live, lasting)
    live["rng"].zero_()
    pending.end_reads()
    for tensor in live.values():
        tensor.detach().zero_()
    pending.end_reads()
    pending.finish()
    assert pending.tensors.keys() == before.keys()
    assert all(torch.equal(pending.tensors[key], values) for key, values in before.items())
    again = begin_staging(stager, live, lasting)
    again.finish()
    assert not any(bool(again.tensors[key].any()) for key in before)
    weight = again.tensors["weight"]
    assert weight.data_ptr() == pending.tensors["weight"].data_ptr()  # memory is used again


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are copied by the threads, as large ones are."""
    monkeypatch.setattr(host_copies, "_SMALLEST_BYTES", 0)


@pytest.mark.parametrize("finished", [False, True])
def test_a_change_without_a_wait(
    device: Device, live: Tensors, small: None, *, finished: bool
) -> None:
    """A tensor that changes during the copy fails the save; once it is copied, it may change."""
    pending = begin_staging(buffer_stager(device), live, live.keys())
    if finished:
        pending.finish()
    live["half"].add_(1)
    if finished:
        pending.end_reads()
        pending.finish()
        return
    with pytest.raises(CheckpointError, match="`half` changed while it was copied"):
        pending.finish()
    pending.end_reads()
    with pytest.raises(CheckpointError, match="`half` changed while it was copied"):
        pending.finish()


@pytest.mark.parametrize("name", ["host-copy", "in-place", "nothing lasts"])
def test_stagers_that_copy_at_once(device: Device, live: Tensors, name: str) -> None:
    """Without `begin`, or without a tensor that lasts, training waits for `stage`."""
    stager = {
        "host-copy": host_copy_stager(),
        "in-place": CheckpointStager("in-place", live_ones, copies=False),
    }.get(name, replace(buffer_stager(device), begin=lambda _: pytest.fail("it was called")))
    before = {key: tensor.detach().clone() for key, tensor in live.items()}
    pending = begin_staging(stager, live, () if name == "nothing lasts" else live.keys())
    assert all(torch.equal(pending.tensors[key], values) for key, values in before.items())
    pending.end_reads()
    pending.finish()


@pytest.mark.parametrize(
    "begin, why",
    [
        (lambda tensors: PendingCopy(drop(tensors)), "did not return exactly the tensors"),
        (lambda tensors: PendingCopy(narrow(tensors)), "it returned torch.float16 (5, 3)"),
        (
            PendingCopy,
            "it declares `copies`, and returned `weight` itself",
        ),
        (dict, "no `PendingCopy`"),
    ],
    ids=["drop", "narrow", "live", "kind"],
)
def test_broken_beginnings(begin: Any, why: str, live: Tensors) -> None:
    """The buffers that a stager announces are checked before anything is written."""
    stager = CheckpointStager("careless", live_ones, begin=begin)
    with pytest.raises(PluginError, match="`careless` did not do its work") as caught:
        begin_staging(stager, live, live.keys())
    assert why in str(caught.value.why)
