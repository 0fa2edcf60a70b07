"""First use of a device: a function that raises is named, with its plugin."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcore.base.errors import DeviceError, PluginError
from lmcore.contract import Device, MemoryStats, Probe, ProbeState
from lmcore.plugin import Selection
from lmcore.runtime.device_start import start_device

SELECTION = Selection("chip", "lmcore-chip", "2.0", Probe("cpu", ProbeState.PRESENT, 1), "on trial")
OPTIONAL = ("memory_stats", "new_stream", "new_event", "pin_memory")


@pytest.fixture
def chip() -> Device:
    """The host as a device that has all that is called at the start."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    return Device.from_torch(
        "cpu",
        memory_stats=lambda: MemoryStats(1, 2, 3, 5),
        new_stream=object,
        new_event=lambda: event,
        pin_memory=lambda tensor: tensor,
    )


def test_the_random_numbers_are_left_as_they_were(chip: Device) -> None:
    """Seeding is tried, and the state put back."""
    torch.manual_seed(3)
    start_device(chip, SELECTION)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_a_device_without_optional_functions(chip: Device) -> None:
    """Functions that the device lacks are not called."""
    start_device(Device.from_torch("cpu"), SELECTION)


@pytest.mark.parametrize(
    "function",
    ["set_current", "synchronize", "get_rng_state", "seed", "set_rng_state", *OPTIONAL],
)
def test_a_function_that_raises_is_named(chip: Device, function: str) -> None:
    """The error names plugin and function, with the first line of the message and its place."""

    def broken(*_: Any) -> None:
        raise TypeError("expected an int\nC++ frames")

    changed: Any = {function: broken}
    with pytest.raises(PluginError, match=f"failed in `{function}`") as error:
        start_device(replace(chip, **changed), SELECTION)
    assert "plugin `chip` (lmcore-chip 2.0)" in error.value.what
    assert error.value.why is not None
    reason, place = error.value.why.splitlines()
    assert reason == "TypeError: expected an int"
    assert place.startswith(f"at {__file__}:")
    assert error.value.hint is not None
    assert f"`{function}=`" in error.value.hint


@pytest.mark.parametrize("own", [DeviceError("no lane", hint="use lane 0"), torch.OutOfMemoryError])
def test_errors_with_a_message_of_their_own_pass_through(chip: Device, own: Any) -> None:
    """An error with a hint keeps it, and a full device is one of the run's own errors."""

    def broken() -> None:
        raise own

    with pytest.raises((DeviceError, torch.OutOfMemoryError)) as error:
        start_device(replace(chip, synchronize=broken), SELECTION)
    assert getattr(error.value, "hint", "use lane 0") == "use lane 0"
