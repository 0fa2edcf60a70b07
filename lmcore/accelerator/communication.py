"""`CommBackend`: a way for processes to exchange tensors, as a plugin offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device

__all__ = ["CommBackend", "registered_comm_backends"]


@dataclass(frozen=True)
class CommBackend:
    """A communication backend of torch.distributed for one device type.

    Attributes:
        name: What `torch.distributed.init_process_group` calls it.
        device_type: Device type of the tensors it carries.
        priority: The highest that is available is used.
        available: Returns None, or the reason why it cannot be used here.
        register: Makes the backend known to torch (called once per process, before the process
            group is created), or None where torch knows it already.
        supports_average: Whether reductions can average; otherwise the core sums and divides.
        needs_device_id: Whether the device is passed to process-group creation.
        facts: Versions, JSON values only.
    """

    name: str
    device_type: str
    priority: int = 0
    available: Callable[[], str | None] = lambda: None
    register: Callable[[], None] | None = None
    supports_average: bool = True
    needs_device_id: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


def registered_comm_backends(device: Device) -> list[CommBackend]:
    """Return the backend that torch.distributed has registered for the device's type, if any."""
    import torch

    if not torch.distributed.is_available():
        return []
    name = torch.distributed.Backend.default_device_backend_map.get(device.type)
    return [CommBackend(name, device.type)] if name else []
