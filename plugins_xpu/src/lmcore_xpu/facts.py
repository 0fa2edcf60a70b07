"""What there is to know without torch and without touching a GPU: bus, nodes, loader, torch."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmcore.accelerator import TorchBuild, torch_build

__all__ = ["LOADER", "RUNTIME", "Facts", "Gpu", "gpus", "read_facts"]

LOADER = "libze_loader.so.1"
RUNTIME = "libze_intel_gpu.so.1"
_VENDOR = "0x8086"
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True)
class Gpu:
    """One Intel display device of the PCI bus.

    Attributes:
        address: Its PCI address; 0000:00:02.0 is the processor's own GPU.
        device_id: Its PCI device id.
        driver: The kernel driver that has it ("xe", "i915"), None without one.
        node: Its render node, "renderD128", None where the kernel made none.
        access: Whether this process may read and write the node under /dev/dri; None where the
            node is not there, as in a container that was not given it.
    """

    address: str
    device_id: str
    driver: str | None
    node: str | None
    access: bool | None


@dataclass(frozen=True)
class Facts:
    """Everything that the probe decides by.

    Attributes:
        gpus: Intel display devices.
        loader, runtime: Whether Level Zero's libraries can be loaded.
        torch: The installed torch.
        kernel: Release of Linux, whose drivers carry no version of their own.
    """

    gpus: tuple[Gpu, ...]
    loader: bool
    runtime: bool
    torch: TorchBuild
    kernel: str = ""


def read_facts(root: Path = Path("/")) -> Facts:
    """Return the facts of this machine; *root* stands before every path that is read."""
    return Facts(
        gpus(root), _can_load(LOADER), _can_load(RUNTIME), torch_build("xpu"), platform.release()
    )


def gpus(
    root: Path, may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
) -> tuple[Gpu, ...]:
    """Return the Intel display devices of the PCI bus, whether a driver has them or not.

    Args:
        root: Stands before /sys and /dev.
        may_use: Says whether this process may read and write a node.
    """
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(device / "vendor") != _VENDOR:
            continue
        if not _read(device / "class").startswith(_DISPLAY_CLASS):
            continue
        driver = device / "driver"
        node = next((one.name for one in sorted((device / "drm").glob("renderD*"))), None)
        path = root / "dev/dri" / node if node else None
        found.append(
            Gpu(
                address=device.name,
                device_id=_read(device / "device"),
                driver=driver.resolve().name if driver.exists() else None,
                node=node,
                access=may_use(path) if path is not None and path.exists() else None,
            )
        )
    return tuple(found)


def _can_load(library: str) -> bool:
    """Say whether a shared library is installed; loading it starts no driver."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
