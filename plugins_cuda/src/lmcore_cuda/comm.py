"""NCCL, which comes with torch, as a communication backend."""

from __future__ import annotations

from typing import Any

from lmcore.contract import CommBackend

__all__ = ["nccl", "nccl_version", "why_no_nccl"]


def nccl() -> CommBackend:
    """Return torch's NCCL backend.

    It needs the device: the communicator is created immediately, so that a broken link fails at the
    start, and no rank guesses its GPU.  The core passes its timeout; `launch_env` sets what happens
    when it expires.
    """
    reason = why_no_nccl()
    facts: dict[str, Any] = {} if reason else {"nccl": nccl_version()}
    return CommBackend(
        name="nccl",
        device_type="cuda",
        available=lambda: reason,
        needs_device_id=True,
        facts=facts,
    )


def why_no_nccl() -> str | None:
    """Return None, or why this torch has no NCCL."""
    from torch import distributed

    if not distributed.is_available():
        return "torch was built without torch.distributed"
    if not distributed.is_nccl_available():
        return "torch was built without NCCL"
    return None


def nccl_version() -> str:
    """Return the version of the NCCL that torch loaded: "2.29.7"."""
    import torch

    version = torch.cuda.nccl.version()
    return ".".join(str(part) for part in version)
