"""Devices of Level Zero's list that `ONEAPI_DEVICE_SELECTOR` selects, by SYCL's rules.

Terms are separated by semicolons: `level_zero:0,1`, `*:gpu`, `!level_zero:1`.  Terms with `!` are
subtracted from the devices of the other terms; without other terms, from all devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmcore.base.errors import counted
from lmcore_xpu.detection.facts import Gpu

__all__ = ["SELECTOR", "Selected", "Unit", "select"]

SELECTOR = "ONEAPI_DEVICE_SELECTOR"
_OURS = "level_zero"
_BACKENDS = {"*", _OURS, "opencl", "cuda", "hip", "native_cpu", "esimd_emulator", "offload"}
_OTHER_TYPES = {"cpu", "fpga"}
_DEVICE = re.compile(r"\*|gpu|cpu|fpga|(\d+|\*)(?:\.(\d+|\*))?(\.(?:\d+|\*))?", re.ASCII)
_EVERYTHING = "`level_zero:gpu`"


@dataclass(frozen=True)
class Unit:
    """A device of Level Zero's: tiles of a GPU, by their numbers on it."""

    gpu: Gpu
    tiles: tuple[int, ...] = (0,)

    @property
    def whole(self) -> bool:
        """True if it is all of its GPU."""
        return len(self.tiles) == self.gpu.tiles

    @property
    def memory(self) -> int:
        """Bytes of dedicated memory; 0 if unknown."""
        return self.gpu.memory * len(self.tiles) // self.gpu.tiles


@dataclass(frozen=True)
class Selected:
    """Devices that are left.

    Attributes:
        units: The devices.
        evidence: Effect of the variable, if any.
        hidden: True if all are hidden on purpose: it selects processors only.
        fault: Reason why none is left, or why the variable cannot be read.
        fix: Advice for that case.
    """

    units: tuple[Unit, ...] = ()
    evidence: str = ""
    hidden: bool = False
    fault: str = ""
    fix: str = ""


@dataclass(frozen=True)
class _Term:
    discards: bool
    backend: str
    devices: tuple[str, ...]


def select(units: Sequence[Unit], env: Mapping[str, str]) -> Selected:
    """Return the devices of *units*, which are in Level Zero's order, that torch can use."""
    value = env.get(SELECTOR, "").strip()
    if not value:
        return Selected(tuple(units))
    setting = f"`{SELECTOR}={env[SELECTOR]}`"
    terms = _terms(value)
    if isinstance(terms, str):
        return Selected(
            fault=f"{setting} cannot be read: {terms}",
            fix=f"set it to {_EVERYTHING}, or to numbers such as `level_zero:0,1`, or unset it",
        )
    accepting = [term for term in terms if not term.discards]
    kept = list(units) if not accepting else _union(accepting, units)
    for term in terms:
        if term.discards:
            gone = _union([term], units)
            kept = [unit for unit in kept if unit not in gone]
    if kept:
        few = len(kept) != len(units) or kept != list(units)
        return Selected(tuple(kept), f"{setting} leaves {len(kept)} of {len(units)}" if few else "")
    if _is_meant(terms):
        return Selected(evidence=f"{setting} leaves no GPU", hidden=True)
    return Selected(
        fault=f"{setting} leaves none of {counted(len(units), 'Level Zero GPU')}, which torch uses",
        fix=f"unset it, or set it to {_EVERYTHING}",
    )


def _terms(value: str) -> list[_Term] | str:
    """Return the terms, or an error message."""
    found = []
    for text in value.lower().rstrip(";").split(";"):
        discards = text.strip().startswith("!")
        backend, colon, devices = text.strip().removeprefix("!").partition(":")
        if not colon or not devices:
            return f"`{text.strip()}` names no device behind a colon"
        if backend not in _BACKENDS:
            return f"`{backend}` is no backend"
        listed = tuple(part.strip() for part in devices.split(","))
        wrong = next((entry for entry in listed if not _DEVICE.fullmatch(entry)), None)
        if wrong is not None:
            return f"`{wrong}` is no device"
        found.append(_Term(discards, backend, listed))
    return found


def _union(terms: Sequence[_Term], units: Sequence[Unit]) -> list[Unit]:
    """Return the devices that any of the terms names, in Level Zero's order."""
    found: list[Unit] = []
    for index, unit in enumerate(units):
        for term in terms:
            if term.backend not in {"*", _OURS}:
                continue
            for device in term.devices:
                found += [match for match in _matches(device, index, unit) if match not in found]
    return found


def _matches(device: str, index: int, unit: Unit) -> list[Unit]:
    """Return the unit, its tiles if they are requested, or nothing.

    A unit of one tile has no parts that SYCL could use as devices.
    """
    if device in {"*", "gpu"}:
        return [unit]
    numbers = _DEVICE.fullmatch(device)
    if numbers is None or device in _OTHER_TYPES or numbers[1] not in {str(index), "*"}:
        return []
    if numbers[2] is None:
        return [unit]
    if len(unit.tiles) == 1 or numbers[3]:
        return []
    tiles = enumerate(unit.tiles)
    return [Unit(unit.gpu, (tile,)) for at, tile in tiles if numbers[2] in {str(at), "*"}]


def _is_meant(terms: Sequence[_Term]) -> bool:
    """Return True if the selector certainly excludes GPUs."""
    return all(
        term.backend == "native_cpu"
        or set(term.devices) <= _OTHER_TYPES
        or (
            term.discards
            and term.backend in {"*", _OURS}
            and not {"*", "gpu"}.isdisjoint(term.devices)
        )
        for term in terms
    )
