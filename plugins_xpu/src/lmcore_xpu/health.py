"""Health of a GPU during a run, from the PCI bus: lost, or fatal errors of its link.

Linux has the files of a PCI device under /sys, for every driver (its documentation:
`Documentation/ABI/testing/sysfs-bus-pci` and `sysfs-bus-pci-devices-aer_stats`).  Level Zero's own
interface for health needs rights that a user rarely has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmcore.base.errors import counted

__all__ = ["health_of"]

_NOBODY = b"\xff\xff"
"""Vendor's number that the bus reads from a device that does not answer."""
_FATAL = re.compile(r"^TOTAL_ERR_FATAL (\d+)$", re.MULTILINE)


def health_of(
    facts: Mapping[str, Any], index: int, root: Path = Path("/")
) -> Callable[[], str | None] | None:
    """Return the health check of a GPU; None if its files on the PCI bus cannot be read.

    Args:
        facts: Facts of the probe, with the GPUs in torch's order.
        index: The GPU's place among them.
        root: Prefix of /sys.
    """
    gpus = facts.get("gpus", [])
    if index >= len(gpus):
        return None
    folder = root / "sys/bus/pci/devices" / str(gpus[index]["address"])
    if _vendor(folder) in {b"", _NOBODY}:  # no PCI device, as under Windows, or none that answers
        return None
    before = _fatal_errors(folder)

    def check() -> str | None:
        vendor = _vendor(folder)
        if not vendor:
            return f"it is no longer on the PCI bus, at {folder.name}"
        if vendor == _NOBODY:
            return f"it does not answer on the PCI bus, at {folder.name}"
        errors = _fatal_errors(folder) - before
        if errors > 0:
            return f"{counted(errors, 'fatal error')} of its PCI link since the run began"
        return None

    return check


def _vendor(folder: Path) -> bytes:
    """Return the vendor's number as the bus reads it now; empty without the device."""
    try:
        with (folder / "config").open("rb") as file:
            return file.read(2)
    except OSError:
        return b""


def _fatal_errors(folder: Path) -> int:
    """Return the fatal errors since the machine started; 0 where the link does not count them."""
    try:
        found = _FATAL.search((folder / "aer_dev_fatal").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(found[1]) if found else 0
