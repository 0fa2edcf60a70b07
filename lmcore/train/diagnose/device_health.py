"""Health of the device during a run: checked every N steps, and asked for after an error.

A plugin that offers `Device.health` can tell a faulty or lost device from an error of the program.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcore.base.errors import LmcoreError, RunError
from lmcore.contract.device_errors import first_line

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore.train.due import Due
    from lmcore.train.state import TrainState

__all__ = ["DeviceCheck", "DeviceHealthError", "device_failure_explained"]


class DeviceHealthError(RunError):
    """An error about a device that is not healthy; nothing is saved."""


class DeviceCheck:
    """Check of the health of this process's device."""

    def __init__(self, state: TrainState, device: Device, *, interval: int) -> None:
        """Check the device before the first step.

        Args:
            state: State of the run.
            device: Device of this process.
            interval: Steps between checks; 0 for none.

        Raises:
            DeviceHealthError: The device is not healthy.
        """
        self._state, self._device = state, device
        if interval:
            self._check()

    def after_step(self, due: Due) -> None:
        """Check the device if that is due.

        Raises:
            DeviceHealthError: The device is not healthy.
        """
        if due.check_device:
            self._check()

    def _check(self) -> None:
        reason = self._device.health_problem()
        if reason is not None:
            raise _error(self._device, f"is not healthy after step {self._state.iteration}", reason)


@contextlib.contextmanager
def device_failure_explained(device: Device, state: TrainState) -> Iterator[None]:
    """Turn an error within the context into one about the device if the device is not healthy.

    Args:
        device: Device of this process.
        state: State of the run.

    Raises:
        DeviceHealthError: The device is not healthy, as when it was lost.
    """
    try:
        yield
    except LmcoreError:
        raise
    except Exception as error:
        reason = device.health_problem()
        if reason is None:
            raise
        why = f"{reason}\nerror of the run: {type(error).__name__}: {first_line(error)}"
        raise _error(device, f"failed in step {state.iteration + 1}", why) from error


def _error(device: Device, what: str, reason: str) -> DeviceHealthError:
    host = socket.gethostname()
    return DeviceHealthError(
        f"device `{device.torch_device}` ({device.name}) on host {host} {what}",
        why=f"{reason}\nnothing was saved since the last checkpoint",
        hint=f"run `lmcore doctor` on {host}; continue the run without this device, or when it is "
        "repaired",
    )
