"""Health of the device during a run: when it is asked, and the errors."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.base.errors import RunError
from lmcore.train.diagnose.device_health import (
    DeviceCheck,
    DeviceHealthError,
    device_failure_explained,
)

STATE: Any = SimpleNamespace(iteration=7)


def device_with(*answers: str | None) -> Any:
    """Return a device whose health is each of the answers in turn."""
    remaining = list(answers)
    return SimpleNamespace(
        torch_device="chip:1", name="Chip 9000", health_problem=lambda: remaining.pop(0)
    )


def test_the_device_is_asked_when_it_is_due() -> None:
    """The error has device, host, step and the plugin's reason."""
    check = DeviceCheck(STATE, device_with(None, None, "42 uncorrectable errors"), interval=2)
    check.after_step(SimpleNamespace(check_device=False))
    check.after_step(SimpleNamespace(check_device=True))
    with pytest.raises(DeviceHealthError) as error:
        check.after_step(SimpleNamespace(check_device=True))
    host = socket.gethostname()
    where = f"device `chip:1` (Chip 9000) on host {host}"
    assert error.value.what == f"{where} is not healthy after step 7"
    assert error.value.why == (
        "42 uncorrectable errors\nnothing was saved since the last checkpoint"
    )
    assert "`lmcore doctor`" in error.value.hint


def test_an_interval_of_zero_asks_nothing() -> None:
    """Neither before the first step."""
    DeviceCheck(STATE, device_with("broken"), interval=0)


def test_an_error_of_a_faulty_device_is_the_devices() -> None:
    """The plugin's reason comes first, then what torch said."""
    with (
        pytest.raises(DeviceHealthError) as error,
        device_failure_explained(device_with("it has fallen off the bus"), STATE),
    ):
        raise RuntimeError("unspecified launch failure\nmore")
    assert error.value.what.endswith("failed in step 8")
    assert error.value.why.startswith(
        "it has fallen off the bus\nerror of the run: RuntimeError: unspecified launch failure\n"
    )


@pytest.mark.parametrize("error", [RuntimeError("a bug"), RunError("in words")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    """A bug on a healthy device keeps its traceback; an error in words is not asked about."""
    with pytest.raises(type(error)) as caught, device_failure_explained(device_with(None), STATE):
        raise error
    assert caught.value is error
