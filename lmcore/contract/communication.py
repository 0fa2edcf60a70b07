"""`CommBackend`: a communication backend of torch.distributed, as a plugin offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcore.contract.device import Device

__all__ = ["CommBackend", "registered_comm_backends"]


@dataclass(frozen=True)
class CommBackend:
    """A communication backend of torch.distributed for one device type.

    Its barrier waits for all ranks of the group: none leaves before the last one has entered.

    Attributes:
        name: name that `torch.distributed.init_process_group` takes.
        device_type: device type of the tensors that it sends.
        priority: the available backend of the highest priority is used.
        available: returns None, or the reason why the backend cannot be used here.
        register: registers the backend with torch, once per process, before the process group is
            created; None if torch has it.
        supports_average: True if reductions can average; otherwise the core sums and divides.
        needs_device_id: True if the device is passed to the creation of the process group.
        facts: versions, JSON values only.
        plugin: Name of the plugin, "lmcore" for the core's own; filled in by the core.
    """

    name: str
    device_type: str
    priority: int = 0
    available: Callable[[], str | None] = lambda: None
    register: Callable[[], None] | None = None
    supports_average: bool = True
    needs_device_id: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    plugin: str = ""


def registered_comm_backends(device: Device) -> list[CommBackend]:
    """Return the backend that torch.distributed has registered for the device's type, if any.

    A package that gives torch the type as text, not as a list, registers each of its letters.
    """
    import torch

    if not torch.distributed.is_available():
        return []
    registered = torch.distributed.Backend.default_device_backend_map
    names = {registered.get(device.type)}
    if None in names:
        names = {registered.get(letter) for letter in device.type}
    return [CommBackend(name, device.type) for name in names if name and len(names) == 1]
