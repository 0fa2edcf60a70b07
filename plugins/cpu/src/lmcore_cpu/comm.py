"""Communication backend of the CPU: gloo, over TCP or shared memory."""

from __future__ import annotations

from lmcore.contract import CommBackend
from lmcore.contract.torch_versions import GLOO_AVERAGE

__all__ = ["gloo"]


def gloo() -> CommBackend:
    """Return torch's gloo backend."""
    return CommBackend(
        name="gloo",
        device_type="cpu",
        available=_why_not,
        supports_average=bool(GLOO_AVERAGE),
    )


def _why_not() -> str | None:
    from torch import distributed

    if not distributed.is_available():
        return "torch was built without torch.distributed"
    if not distributed.is_gloo_available():
        return "torch was built without gloo"
    return None
