"""Check of a device's streams, events and graphs: they have the methods that the core calls.

Part of `lmcore plugin check`.  The list is `contract.torch_needs`, of the version that the plugin
is compared with.  What the device type's module lacks is found by `Device.from_torch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lmcore.plugin.record import describe

if TYPE_CHECKING:
    from lmcore.contract.device import Device

__all__ = ["torch_problems"]

_MAKERS = {"Stream": "new_stream", "Event": "new_event", "Graph": "new_graph"}
_CURRENT_STREAM = "torch.accelerator.current_stream"


def torch_problems(device: Device, needs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the methods that the core calls for an ability of the device, and that are missing.

    Args:
        device: the device.
        needs: list of a version of the contract.
    """
    import torch

    made: dict[str, Any] = {}
    for name, need in needs.items():
        owner, _, method = name.partition(".")
        abilities = need["abilities"]
        if need["optional"] or not abilities:
            continue
        if any(getattr(device, ability, None) is None for ability in abilities):
            continue
        if name == _CURRENT_STREAM:
            try:
                torch.accelerator.current_stream(device.torch_device)
            except Exception as error:  # noqa: BLE001 - a device may raise anything
                yield f"`{name}` raised {describe(error)}; needed for: {need['used']}"
        elif owner in _MAKERS:
            if owner not in made:
                made[owner] = getattr(device, _MAKERS[owner])()
            if not hasattr(made[owner], method):
                yield f"its `{owner}` has no `{method}` ({need['used']}): {need['missing']}"
