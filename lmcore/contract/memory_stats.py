"""`MemoryStats`: a device's memory at one moment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryStats"]


@dataclass(frozen=True)
class MemoryStats:
    """Device memory in bytes.

    Attributes:
        allocated: in use by tensors now.
        peak_allocated: highest `allocated` since the peak was reset.
        reserved: held by the allocator, in use or cached.
        total: memory of the device; None if unknown.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    total: int | None
