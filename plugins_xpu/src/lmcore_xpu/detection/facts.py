"""Facts of the machine, read without torch and without using a GPU: bus, nodes, loader, torch."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lmcore.contract import TorchBuild, torch_build
from lmcore_xpu.detection.cards import Card, card_of

__all__ = [
    "LOADER",
    "RUNTIME",
    "Facts",
    "Gpu",
    "gpus",
    "has_slingshot",
    "in_container",
    "read_facts",
    "try_to_open",
]

LOADER = "libze_loader.so.1"
RUNTIME = "libze_intel_gpu.so.1"
_VENDOR = "0x8086"
_DISPLAY_CLASS = "0x03"
_FOR_GUESTS = {"vfio-pci", "pci-stub", "xe-vfio-pci"}
"""Drivers that reserve a GPU for a virtual machine."""
_WSL_NODE, _WSL_DRIVERS = "dxg", "usr/lib/wsl/drivers"


@dataclass(frozen=True)
class Gpu:
    """One Intel display device.

    Attributes:
        address: Its PCI address; 0000:00:02.0 is the processor's own GPU, "WSL" one of Windows.
        device_id: Its PCI device id; empty if unknown.
        driver: The kernel driver that has it ("xe", "i915"), None without one.
        node: Its render node, "renderD128"; None without one.
        access: True if this process may read and write the node; None if the node does not exist,
            as in a container without it.
        tiles: Tiles behind the address.
        memory: Bytes of dedicated memory, of all tiles; 0 if unknown.
        group: Group that may open the node.
        error: Number of the system's error if the node exists and did not open.
    """

    address: str
    device_id: str
    driver: str | None
    node: str | None
    access: bool | None
    tiles: int = 1
    memory: int = 0
    group: str = ""
    error: int = 0

    @property
    def card(self) -> Card:
        """Its model."""
        return card_of(self.device_id, self.address)

    @property
    def path(self) -> str:
        """The node's path; empty without one."""
        if self.node is None:
            return ""
        return f"/dev/{self.node}" if self.node == _WSL_NODE else f"/dev/dri/{self.node}"


@dataclass(frozen=True)
class Facts:
    """Everything that the probe decides by.

    Attributes:
        gpus: Intel display devices.
        loader, runtime: True if Level Zero's libraries can be loaded.
        torch: The installed torch.
        kernel: Release of Linux, whose drivers have no other version.
        container: True in a container, whose devices are given from outside.
    """

    gpus: tuple[Gpu, ...]
    loader: bool
    runtime: bool
    torch: TorchBuild
    kernel: str = ""
    container: bool = False


def read_facts(root: Path = Path("/")) -> Facts:
    """Return the facts of this machine; *root* is the prefix of every path."""
    return Facts(
        gpus(root),
        _can_load(LOADER) or _comes_with_torch(LOADER),
        _can_load(RUNTIME),
        torch_build("xpu"),
        platform.release(),
        in_container(root),
    )


def try_to_open(path: Path) -> int:
    """Open a node and close it, which starts nothing on the GPU; return the error's number, or 0.

    Permissions are not enough: a batch system's control group may deny a node that this user
    could read.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def gpus(root: Path, try_node: Callable[[Path], int] = try_to_open) -> tuple[Gpu, ...]:
    """Return the Intel display devices, whether a driver has them or not, in the bus's order.

    GPUs that are reserved for virtual machines are left out.

    Args:
        root: Prefix of /sys, /dev and /usr.
        try_node: Function that opens a node and returns the number of the error.
    """
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(device / "vendor") != _VENDOR:
            continue
        if not _read(device / "class").startswith(_DISPLAY_CLASS):
            continue
        driver = device / "driver"
        name = driver.resolve().name if driver.exists() else None
        if name not in _FOR_GUESTS:
            found.append(_gpu(root, device, name, try_node))
    return tuple(found) or _of_windows(root, try_node)


def _gpu(root: Path, device: Path, driver: str | None, try_node: Callable[[Path], int]) -> Gpu:
    device_id = _read(device / "device")
    card = card_of(device_id, device.name)
    node = next((path.name for path in sorted((device / "drm").glob("renderD*"))), None)
    gpu = Gpu(
        device.name,
        device_id,
        driver,
        node,
        access=None,
        tiles=_tiles(device, driver, card),
        memory=_memory(device, card),
    )
    return gpu if node is None else _tried(gpu, root / "dev/dri" / node, try_node)


def _tried(gpu: Gpu, path: Path, try_node: Callable[[Path], int]) -> Gpu:
    """Return the GPU with the result of opening its node."""
    if not path.exists():
        return gpu
    number = try_node(path)
    return replace(gpu, access=number == 0, group=_group(path), error=number)


def _tiles(device: Path, driver: str | None, card: Card) -> int:
    """Return the number of tiles that the driver shows, else the model's.

    `xe` has a folder for each.  `i915` has one for each graphics unit (GT): on the Max series these
    are the tiles; on others a second one is the media unit of the same tile.
    """
    pattern = "tile[0-9]*" if driver == "xe" else "drm/card*/gt/gt[0-9]*"
    if driver == "xe" or card.is_max:
        return len(list(device.glob(pattern))) or card.tiles
    return card.tiles


def _memory(device: Path, card: Card) -> int:
    """Return the bytes of memory by `xe` (per tile) or `i915` (in all), else the model's."""
    told = [
        int(text)
        for pattern in ("tile[0-9]*/physical_vram_size_bytes", "drm/card*/lmem_total_bytes")
        for file in device.glob(pattern)
        if (text := _read(file)).isascii() and text.isdigit()
    ]
    return sum(told) or card.memory << 30


def _of_windows(root: Path, try_node: Callable[[Path], int]) -> tuple[Gpu, ...]:
    """Return the GPU that Windows gives its Linux; it is on no bus there."""
    node = root / "dev" / _WSL_NODE
    if not node.exists() or not any((root / _WSL_DRIVERS).glob("iigd_dch*")):
        return ()
    return (_tried(Gpu("WSL", "", "dxgkrnl", _WSL_NODE, access=None), node, try_node),)


def has_slingshot(root: Path = Path("/")) -> bool:
    """Return True if this host has a network card of HPE's Slingshot, as Aurora's have."""
    return any((root / "sys/class/cxi").glob("cxi[0-9]*"))


def in_container(root: Path = Path("/")) -> bool:
    """Return True if this is a container of Docker's or Podman's, or one of Apptainer's."""
    return any(
        (root / mark).exists() for mark in (".dockerenv", "run/.containerenv", ".singularity.d")
    )


def _can_load(library: str) -> bool:
    """Return True if a shared library is installed; loading it starts no driver."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _comes_with_torch(library: str, prefix: Path = Path(sys.prefix)) -> bool:
    """Return True if a wheel brought a library, to a place that only torch searches."""
    spec = importlib.util.find_spec("torch")  # which imports nothing
    own = [Path(folder) / "lib" for folder in (spec and spec.submodule_search_locations) or ()]
    return any((folder / library).exists() for folder in (prefix / "lib", *own))


def _group(path: Path) -> str:
    try:
        return path.group()
    except KeyError:
        return str(path.stat().st_gid)
    except (OSError, NotImplementedError):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
