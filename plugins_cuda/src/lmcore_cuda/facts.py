"""What there is to know without torch and without touching a GPU: driver, bus, torch's build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmcore.accelerator import TorchBuild, torch_build
from lmcore_cuda.nvml import DriverReport, load_library, read_driver

__all__ = ["Facts", "pci_gpus", "read_facts"]

_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True)
class Facts:
    """Everything that the probe decides by.

    Attributes:
        driver: What NVML said.
        bus: PCI addresses of NVIDIA display devices.
        torch: The installed torch.
    """

    driver: DriverReport
    bus: tuple[str, ...]
    torch: TorchBuild


def read_facts(root: Path = Path("/")) -> Facts:
    """Return the facts of this machine; *root* stands before every path that is read."""
    return Facts(read_driver(load_library()), pci_gpus(root), torch_build("cuda"))


def pci_gpus(root: Path) -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA display devices, whether a driver has them or not."""
    return tuple(
        device.name
        for device in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _read(device / "vendor") == _VENDOR
        and _read(device / "class").startswith(_DISPLAY_CLASS)
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
