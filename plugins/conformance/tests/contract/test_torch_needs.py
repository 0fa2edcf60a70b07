"""The list of torch's functions that the core calls for a device, compared with its source."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lmcore
from lmcore.contract import Device, torch_device
from lmcore_conformance.contract.torch_needs import TORCH_NEEDS, describe_torch_needs
from lmcore_conformance.plugin_check.package_uses import uses_of
from lmcore_conformance.plugin_check.torch_functions import torch_problems

CORE = Path(lmcore.__file__).parent

DEVICE_FUNCTIONS = (
    "torch.Event",
    "torch.OutOfMemoryError",
    "torch.Stream",
    "torch.accelerator.",
    "torch.amp.",
    "torch.autocast",
    "torch.distributed.Backend.",
    "torch.distributed.fsdp.",
    "torch.get_device_module",
    "torch.is_autocast",
    "torch.manual_seed",
    "torch.profiler.",
    "torch.random.",
    "torch.utils.backend_registration",
)
"""Names of torch, and beginnings of names, that concern a device."""

OF_THE_HOST = {
    "torch.distributed.fsdp.FSDPModule",
    "torch.profiler.ProfilerAction",
    "torch.profiler.ProfilerActivity",
    "torch.profiler.profile",
    "torch.profiler.record_function",
}
"""Names among them that need nothing of a device."""

COMMON = {"query", "record", "synchronize", "wait"}
"""Methods of streams and events whose names other objects also have."""

QUEUES = ("new_stream", "new_event", "torch.Stream", "torch.Event", "current_stream")


@cache
def sources() -> dict[Path, ast.Module]:
    """Return the syntax tree of each file of the core that has to do with torch."""
    texts = {path: path.read_text("utf-8") for path in sorted(CORE.rglob("*.py"))}
    return {path: ast.parse(text) for path, text in texts.items() if "torch" in text}


def functions_called() -> set[str]:
    """Return the functions of torch that concern a device, as the core's source names them."""
    used = {use.path for tree in sources().values() for use in uses_of("torch", tree, lambda _: ())}
    names = {name for name in used if name.startswith(DEVICE_FUNCTIONS)}
    names -= {name for name in names for known in OF_THE_HOST if f"{name}.".startswith(f"{known}.")}
    return {
        next((known for known in TORCH_NEEDS if f"{name}.".startswith(f"{known}.")), name)
        for name in names
    }


def methods_called() -> set[str]:
    """Return the methods of streams, events, graphs and host tensors that the core calls."""
    of_queues = {name for name in (*dir(torch.Stream), *dir(torch.Event)) if name[0] != "_"}
    of_queues.remove("device")
    of_queues |= {"capture_begin", "capture_end", "replay"}
    anywhere = (of_queues - COMMON) | {"pin_memory", "is_pinned", "record_stream"}
    found = set()
    for path, tree in sources().items():
        in_queues = any(word in path.read_text("utf-8") for word in QUEUES)
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(attr=name)) if name in (
                    anywhere | of_queues if in_queues else anywhere
                ):
                    found.add(name)
                case ast.withitem(context_expr=ast.Name(id=name) | ast.Attribute(attr=name)):
                    found |= {"__enter__"} if name.endswith("stream") else set()
    return found


def module_functions_called() -> set[str]:
    """Return the functions of the device type's module that the core calls."""
    names = {name for attributes, _ in torch_device._FUNCTIONS.values() for name in attributes}
    for node in ast.walk(sources()[Path(torch_device.__file__)]):
        match node:
            case ast.Call(
                func=ast.Name(id="_find" | "_required" | "getattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                names.add(name)
    for tree in sources().values():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(
                    value=ast.Call(func=ast.Attribute(attr="get_device_module")), attr=name
                ):
                    names.add(name)
    return names


def listed(*owners: str) -> set[str]:
    """Return the names in the list that are of one of *owners*, without the owner."""
    split = (name.split(".", 1) for name in TORCH_NEEDS)
    return {name for owner, name in split if owner in owners}


def test_the_list_has_the_functions_of_torch_that_the_core_calls():
    """Each function that concerns a device, and none that the core does not call any more."""
    assert functions_called() == {f"torch.{name}" for name in listed("torch")}


def test_the_list_has_the_methods_that_the_core_calls():
    """Methods of streams, events, graphs, and of tensors of the host that are pinned."""
    assert methods_called() == listed("Stream", "Event", "Graph", "Tensor")


def test_the_list_has_the_functions_of_a_devices_module():
    """Each with the function of `torch.accelerator` that replaces it."""
    assert module_functions_called() == listed("module")
    instead = {
        name: f"torch.accelerator.{other}" for name, other in torch_device._ACCELERATOR.items()
    }
    instead |= {name: f"torch.{name}" for name in ("Stream", "Event")}
    assert instead == {
        name.removeprefix("module."): need.instead
        for name, need in TORCH_NEEDS.items()
        if need.instead
    }


def test_the_list_names_abilities_of_devices():
    """A need of an ability names a field of `Device`."""
    fields = {field.name for field in dataclasses.fields(Device)}
    assert {ability for need in TORCH_NEEDS.values() for ability in need.abilities} <= fields


@pytest.fixture
def device():
    """A device whose streams and events come from this file."""

    class Stream:
        def __enter__(self): ...
        def wait_event(self, event): ...

    class Event:
        def record(self, stream=None): ...

    return SimpleNamespace(
        type="mine",
        torch_device=torch.device("cpu"),
        new_stream=Stream,
        new_event=Event,
        pin_memory=lambda tensor: tensor,
        new_graph=None,
    )


def test_a_device_without_a_listed_method_fails_the_check(device, monkeypatch):
    """Each is named with its use; abilities that the device lacks do not count."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: device)
    found = list(torch_problems(device, describe_torch_needs()))
    names = [text.partition(" (")[0] for text in found]
    assert names == ["its `Event` has no `query`", "its `Event` has no `synchronize`"]
    assert found[0].endswith(
        "(release of host memory whose copy is done): an error at the first batch"
    )
    device.new_event = device.pin_memory = None
    assert list(torch_problems(device, describe_torch_needs())) == []
    assert list(torch_problems(device, {})) == []


def test_a_device_without_a_current_stream_fails_the_check(device, monkeypatch):
    """The error is part of the message."""

    def fail(device):
        raise RuntimeError("no streams here\nmore")

    monkeypatch.setattr(torch.accelerator, "current_stream", fail)
    (found, *_) = torch_problems(device, describe_torch_needs())
    assert found.startswith("`torch.accelerator.current_stream` raised RuntimeError: no streams")
