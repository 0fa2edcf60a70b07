"""Checks of torch's functions fail on a device whose functions are wrong."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from lmcore.contract import Device
from lmcore_conformance.checks.device import torch_functions
from lmcore_conformance.registry import Failure


class Stream:
    """A stream on the host that becomes the current one, and restores the former or not."""

    stack = ("outside",)
    restores = True

    def __enter__(self):
        Stream.stack = (*Stream.stack, self)

    def __exit__(self, *error):
        Stream.stack = Stream.stack[:-1] if Stream.restores else Stream.stack

    def wait_event(self, event): ...
    def synchronize(self): ...


@pytest.fixture
def bench(monkeypatch):
    """The host with streams and events of this file."""
    monkeypatch.setattr(Stream, "stack", ("outside",))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream.stack[-1])
    made = {"new_stream": Stream, "new_event": lambda: SimpleNamespace(record=lambda: None)}
    device = Device.from_torch("cpu", **made)
    return SimpleNamespace(device=device, torch_device=device.torch_device)


def test_a_context_that_leaves_its_stream_behind_is_found(bench, monkeypatch):
    """A right context passes; one that does not restore the former stream fails."""
    assert torch_functions.current_stream(bench)
    monkeypatch.setattr(Stream, "restores", False)
    with pytest.raises(Failure, match="is not the stream of the context"):
        torch_functions.current_stream(bench)


def test_a_generator_that_is_not_forked_is_found(bench, monkeypatch):
    """Torch's functions pass on the host; a context that seeds and restores nothing fails."""
    assert torch_functions.fork_rng(bench)
    monkeypatch.setattr(
        torch_functions, "fixed_random_numbers", lambda device, seed: contextlib.nullcontext()
    )
    with pytest.raises(Failure, match=r"gives two sequences; .* does not restore"):
        torch_functions.fork_rng(bench)
