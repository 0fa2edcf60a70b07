"""Communication backends: torch_xla's own between connected devices, else gloo on the host."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from lmcore.contract import CommBackend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["backends", "barrier"]

HOST_GLOO = "xla_gloo"


def backends() -> list[CommBackend]:
    """Return the communication backends, the preferred one first."""
    return [
        CommBackend(
            name="xla",
            device_type="xla",
            priority=10,
            available=_why_not_xla,
            register=_register_xla,
            supports_average=False,
            facts={"carrier": "collectives in the compiled programs"},
        ),
        CommBackend(
            name=HOST_GLOO,
            device_type="xla",
            available=_why_not_gloo,
            register=_register_gloo,
            supports_average=False,
            facts={"carrier": "gloo, on copies in host memory"},
        ),
    ]


def _why_not_xla() -> str | None:
    """Return why PJRT does not connect the devices of several processes."""
    from torch_xla import runtime

    if runtime.process_count() > 1:
        return None
    return f"PJRT's client `{runtime.device_type()}` does not connect processes"


def _register_xla() -> None:
    """Register torch_xla's process group with torch: with a barrier, and descriptions of groups."""
    from torch import distributed
    from torch_xla.distributed import xla_backend  # importing it registers it

    xla_backend.ProcessGroupXla.barrier = barrier
    theirs = distributed.new_group
    if "group_desc" not in inspect.signature(theirs).parameters:

        @functools.wraps(theirs)
        def new_group(*arguments: Any, group_desc: str | None = None, **options: Any) -> Any:
            del group_desc  # torch_xla's function, which replaces torch's, takes none
            return theirs(*arguments, **options)

        distributed.new_group = new_group


def barrier(group: Any, opts: Any = None) -> Work:
    """Wait for all ranks of a group of torch_xla, whose own barrier returns at once.

    The ranks meet in the store that connects them, so that nothing is compiled, and a rank that is
    missing is an error after the group's timeout.

    Raises:
        torch.distributed.DistStoreError: A rank has not called it in time.
    """
    from lmcore_xla.host_group import done

    del opts  # torch passes it by this name
    store, turn = group.prefix_store, getattr(group, "lmcore_barriers", 0)
    group.lmcore_barriers = turn + 1
    # One key for each barrier, which stays: a store in Python, as lmcore's, lets torch delete none.
    everyone = f"lmcore/barrier/{turn}"
    if store.add("lmcore/barrier", 1) == group.size() * (turn + 1):
        store.set(everyone, "")
    store.wait([everyone], group.timeout)
    return done([])


def _why_not_gloo() -> str | None:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        return "torch was built without gloo"
    return None


def _register_gloo() -> None:
    """Make `HostGroup` known to torch, once, and give torch's function for groups back to it.

    torch_xla replaces it by a function with fewer arguments, for its groups.
    """
    from torch import distributed

    distributed.new_group = distributed.distributed_c10d.new_group
    if not hasattr(distributed.Backend, HOST_GLOO.upper()):
        distributed.Backend.register_backend(
            HOST_GLOO, _create_group, extended_api=True, devices=["xla"]
        )


def _create_group(common: Any, options: Any) -> ProcessGroup:
    """Return the group of one process; torch calls it."""
    from lmcore_xla.host_group import HostGroup

    return HostGroup(common.store, common.group_rank, common.group_size, common.timeout)
