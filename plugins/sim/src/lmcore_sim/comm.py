"""simccl: how processes exchange tensors of simulated devices, carried by gloo on the host."""

from __future__ import annotations

from typing import Any

from lmcore.contract import CommBackend
from lmcore.contract.torch_versions import GLOO_AVERAGE

__all__ = ["register", "simccl"]

NAME = "simccl"


def simccl() -> CommBackend:
    """Return the backend, which averages if gloo does, its carrier."""
    return CommBackend(
        name=NAME,
        device_type="sim",
        available=_why_not,
        register=register,
        supports_average=bool(GLOO_AVERAGE),
        facts={"carrier": "gloo"},
    )


def _why_not() -> str | None:
    from torch import distributed

    if not distributed.is_available():
        return "torch was built without torch.distributed"
    if not distributed.is_gloo_available():
        return "torch was built without gloo, which carries it"
    return None


def register() -> None:
    """Make the backend known to torch, once; nothing happens where torch cannot have it."""
    from torch import distributed

    if _why_not() is not None or hasattr(distributed.Backend, NAME.upper()):
        return
    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["sim"])


def _create(common: Any, options: Any) -> Any:
    """Return the backend of one process group; torch calls it."""
    from torch.distributed import ProcessGroupGloo

    from lmcore_sim import _C

    rank, size = common.group_rank, common.group_size
    carrier = ProcessGroupGloo(common.store, rank, size, timeout=common.timeout)
    return _C.SimBackend(carrier, rank, size)
