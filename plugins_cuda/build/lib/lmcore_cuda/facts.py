"""What there is to know without torch and without touching a GPU: driver, bus, torch's build."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from lmcore_cuda.nvml import DriverReport, load_library, read_driver

__all__ = ["Facts", "TorchBuild", "pci_gpus", "read_facts", "torch_build"]

_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, as its metadata and version file give it.

    Attributes:
        version: "2.13.0+cu130"; empty where torch is not installed.
        cuda: The CUDA version it was built with, None for a build without.
    """

    version: str
    cuda: str | None

    @property
    def release(self) -> str:
        """The version without its local part."""
        return self.version.partition("+")[0]


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
    return Facts(read_driver(load_library()), pci_gpus(root), torch_build())


def pci_gpus(root: Path) -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA display devices, whether a driver has them or not."""
    return tuple(
        device.name
        for device in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _read(device / "vendor") == _VENDOR
        and _read(device / "class").startswith(_DISPLAY_CLASS)
    )


def torch_build(version_file: Path | None = None) -> TorchBuild:
    """Return which torch is installed, without importing it.

    Args:
        version_file: torch's `version.py`; default: that of the installed distribution.
    """
    try:
        installed = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return TorchBuild("", None)
    if version_file is None:
        version_file = Path(str(installed.locate_file("torch/version.py")))
    text = _read(version_file)
    return TorchBuild(_assigned(text, "__version__") or installed.version, _assigned(text, "cuda"))


def _assigned(text: str, name: str) -> str | None:
    """Return the string that a line `name = '...'` (or with a type) assigns; None for others."""
    found = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*['\"]([^'\"\n]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
