"""Facts of the machine, read without torch and without using a GPU: driver, bus, torch's build."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lmcore.contract import TorchBuild, torch_build
from lmcore_cuda.detection.architectures import read_architectures
from lmcore_cuda.driver.cuda_api import load_driver, read_compute_driver
from lmcore_cuda.driver.nvml import DriverReport, load_library, read_driver

__all__ = ["DeniedFile", "Facts", "denied_files", "pci_gpus", "read_facts"]

_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
_FILES = ("nvidiactl", "nvidia-uvm", "nvidia[0-9]*")
_WSL = "dev/dxg"


@dataclass(frozen=True)
class DeniedFile:
    """A device file that this user may not open, and the group that may."""

    path: str
    group: str


@dataclass(frozen=True)
class Facts:
    """Everything that the probe decides by.

    Attributes:
        driver: Report of the driver.
        bus: PCI addresses of NVIDIA display devices.
        torch: The installed torch.
        architectures: GPU architectures of its kernels; empty if unknown.
        denied: Device files that this user may not open.
    """

    driver: DriverReport
    bus: tuple[str, ...]
    torch: TorchBuild
    architectures: tuple[str, ...] = ()
    denied: tuple[DeniedFile, ...] = ()


def read_facts(root: Path = Path("/")) -> Facts:
    """Return the facts of this machine; *root* is the prefix of every path."""
    driver = read_driver(load_library())
    if not driver.library and _has_device_file(root):
        driver = read_compute_driver(load_driver(), driver.message)
    build = torch_build("cuda")
    wanted = driver.gpus and build.toolkit is not None  # the file is read only where it counts
    return Facts(
        driver,
        pci_gpus(root),
        build,
        read_architectures() if wanted else (),
        denied_files(root),
    )


def _has_device_file(root: Path) -> bool:
    return (root / _WSL).exists() or any((root / "dev").glob("nvidia[0-9]*"))


def denied_files(root: Path) -> tuple[DeniedFile, ...]:
    """Return the driver's device files that this process may not read and write."""
    return tuple(
        DeniedFile(str(path), _group(path))
        for pattern in _FILES
        for path in sorted((root / "dev").glob(pattern))
        if not os.access(path, os.R_OK | os.W_OK)
    )


def _group(path: Path) -> str:
    try:
        return path.group()
    except (OSError, KeyError, NotImplementedError):
        return ""


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
