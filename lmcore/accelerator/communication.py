"""`CommBackend`: a way for processes to exchange tensors, as a plugin offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CommBackend"]


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
