"""Probe of the PJRT device: which one, how many, and does torch_xla fit torch; torch-free."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.errors import counted
from lmcore.contract import Probe, ProbeState, torch_build

__all__ = ["CHOICE", "HOST", "Facts", "probe", "read_facts"]

CHOICE = "PJRT_DEVICE"
"""torch_xla's variable that names the PJRT client of a process."""
HOST = "CPU"
"""PJRT's client that computes on the host, to try programs without an accelerator."""
_TPU = "TPU"
_BUILT_IN = (_TPU, HOST, "NEURON", "XPU")
"""Clients that torch_xla knows without a package of another project."""
_PCI = Path("/sys/bus/pci/devices")
_VENDOR = "0x1ae0"
_CHIPS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
"""PCI identifiers of TPUs, as JAX has them: v2 and v3, v4, v5p, v5e, v6e, v7."""
_PLUGINS = "torch_xla.plugins"
"""Group of entry points by which packages bring PJRT clients."""
_AFTER_HOST, _BEFORE_HOST = -50, 100
_NEWEST = "2.9"
"""The newest release of torch_xla that is known here, and of the torch that it needs."""


@dataclass(frozen=True)
class Facts:
    """Facts of this machine that the probe has read.

    Attributes:
        chips: PCI addresses of TPU chips.
        torch: version of the installed torch, empty without one.
        torch_xla: version of the installed torch_xla; None if it is not installed.
        clients: names of PJRT clients that installed packages bring.
    """

    chips: tuple[str, ...]
    torch: str
    torch_xla: str | None
    clients: tuple[str, ...]


def read_facts(pci: Path = _PCI) -> Facts:
    """Read the PCI bus and the metadata of packages; loads nothing."""
    try:
        torch_xla: str | None = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        torch_xla = None
    clients = {entry.name.upper() for entry in importlib.metadata.entry_points(group=_PLUGINS)}
    return Facts(tuple(_chips(pci)), torch_build("xla").release, torch_xla, tuple(sorted(clients)))


def _chips(pci: Path) -> Iterable[str]:
    for folder in sorted(pci.glob("*")):
        try:
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _VENDOR and device in _CHIPS:
            yield folder.name


def probe(facts: Facts, env: Mapping[str, str]) -> Probe:
    """Return the device that `PJRT_DEVICE` names, or the TPU if it is not set."""
    wanted = env.get(CHOICE, "").upper()
    if not wanted and not facts.chips:
        return _answer(
            ProbeState.ABSENT,
            f"no TPU on the PCI bus, and `{CHOICE}` names no other device "
            f"(`{CHOICE}={HOST}` computes on the host, for trials)",
        )
    client = wanted or _TPU
    evidence = _evidence(client, facts)
    fault, fix = _fault(client, facts)
    if fault:
        return _answer(ProbeState.BROKEN, fault, *evidence, fix=fix)
    count = max(1, len(facts.chips)) if client == _TPU else 1
    priority = _AFTER_HOST if client == HOST else _BEFORE_HOST
    found = {"pjrt_device": client, "torch_xla": facts.torch_xla, "on_host": client == HOST}
    return Probe("xla", ProbeState.PRESENT, count, priority, evidence, None, found)


def _evidence(client: str, facts: Facts) -> tuple[str, ...]:
    if client == _TPU and facts.chips:
        return (f"{counted(len(facts.chips), 'TPU chip')} at {', '.join(facts.chips)}",)
    return (f"`{CHOICE}={client}`",)


def _fault(client: str, facts: Facts) -> tuple[str, str]:
    """Return why the device cannot be used, and the fix; both empty if it can."""
    release = _minor(facts.torch)
    if facts.torch_xla is None:
        return "torch_xla is not installed", _install(release)
    needed = _minor(facts.torch_xla)
    if needed != release:
        here = f"torch {facts.torch} is installed" if facts.torch else "torch is not installed"
        fault = f"torch_xla {facts.torch_xla} needs torch {needed}, and {here}"
        return fault, f"run `pip install 'torch~={needed}.0'`"
    known = sorted({*_BUILT_IN, *facts.clients})
    if client not in known:
        fix = f"set `{CHOICE}` to one of {', '.join(known)}, or install the package that brings it"
        return f"no PJRT client is called `{client}`", fix
    if client == _TPU and not facts.chips:
        return "no TPU on the PCI bus", f"unset `{CHOICE}`, or run on a machine with a TPU"
    return "", ""


def _install(release: str) -> str:
    """Return how to install torch_xla beside a release of torch; empty: there is no torch."""
    if release and _numbers(release) <= _numbers(_NEWEST):
        return f"run `pip install 'torch_xla~={release}.0'`"
    both = f"run `pip install 'torch~={_NEWEST}.0' 'torch_xla~={_NEWEST}.0'`"
    why = f"no torch_xla for torch {release} is known, the newest is {_NEWEST}"
    return f"{both} ({why})" if release else both


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _minor(version: str) -> str:
    """Return the first two numbers of a version."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else ""


def _answer(state: ProbeState, *evidence: str, fix: str | None = None) -> Probe:
    return Probe("xla", state, 0, _BEFORE_HOST, evidence, fix, {})
