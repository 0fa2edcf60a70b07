"""First use of a device: each of its functions is called once, so that a faulty one is named.

Without it a function that raises appears as a traceback of torch, perhaps in the middle of a step.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcore.base.errors import LmcoreError, PluginError
from lmcore.contract.device_errors import first_line

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore.plugin.selection import Selection

__all__ = ["set_current", "start_device"]


def set_current(device: Device, selection: Selection) -> None:
    """Make *device* the current one of this process.

    Args:
        device: Device of this process.
        selection: The plugin that created it, for messages.

    Raises:
        PluginError: `set_current` raised.
    """
    with _named("set_current", device, selection):
        device.set_current()


def start_device(device: Device, selection: Selection) -> None:
    """Make *device* the current one of this process, and call each of its functions once.

    The state of its random numbers is left as it was.

    Args:
        device: Device of this process.
        selection: The plugin that created it, for messages.

    Raises:
        PluginError: A function raised; the message names the plugin and the function.
    """
    import torch

    set_current(device, selection)
    with _named("synchronize", device, selection):
        device.synchronize()
    with _named("get_rng_state", device, selection):
        state = device.get_rng_state().clone()
    with _named("seed", device, selection):
        device.seed(0)
    with _named("set_rng_state", device, selection):
        device.set_rng_state(state)
    for name in ("memory_stats", "new_stream"):
        function = getattr(device, name)
        if function is not None:
            with _named(name, device, selection):
                function()
    if device.pin_memory is not None:
        with _named("pin_memory", device, selection):
            device.pin_memory(torch.empty(1))
    if device.new_event is not None:
        with _named("new_event", device, selection):
            event = device.new_event()
            event.record()
            event.synchronize()


@contextlib.contextmanager
def _named(function: str, device: Device, selection: Selection) -> Iterator[None]:
    """Raise an exception of the context as an error that names *function*."""
    import torch

    try:
        yield
    except (LmcoreError, torch.OutOfMemoryError):
        raise
    except Exception as cause:
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        package = f"{selection.distribution} {selection.version}"
        raise PluginError(
            f"device `{device.type}` of plugin `{selection.plugin}` ({package}) failed in "
            f"`{function}`",
            why=f"{type(cause).__name__}: {first_line(cause)}\nat {frame.filename}:{frame.lineno}",
            hint=f"`lmcore plugin check {selection.plugin}` tests the plugin; its authors can pass "
            f"`{function}=` to `Device.from_torch`",
        ) from cause
