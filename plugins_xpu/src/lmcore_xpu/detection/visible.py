"""GPUs, or tiles of GPUs, that torch sees: Level Zero's variables by its driver's rules.

`ZE_FLAT_DEVICE_HIERARCHY` makes a device a tile (FLAT, the default, and COMBINED) or a card
(COMPOSITE).  `ZE_AFFINITY_MASK` lists devices by number in the bus's order, the processor's GPU
included.  Level Zero lists discrete GPUs before the processor's; SYCL keeps the devices that
`ONEAPI_DEVICE_SELECTOR` selects; torch drops the processor's GPU if there is a discrete one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lmcore.base.errors import counted
from lmcore_xpu.detection.facts import Gpu
from lmcore_xpu.detection.selector import Unit, select

__all__ = ["HIERARCHY", "MASK", "Visible", "composite", "mask_of", "units_of", "visible_units"]

MASK = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
_FLAT, _COMPOSITE, _COMBINED = "FLAT", "COMPOSITE", "COMBINED"
_NO_MASK = {"", "default"}
_ENTRY = re.compile(r"(-?\d+)(?:\.(\d+))?(\.\d+)?", re.ASCII)


@dataclass(frozen=True)
class Visible:
    """Devices that torch sees.

    Attributes:
        units: Its devices, in its order.
        evidence: Effects of the variables and rules, a line each.
        hidden: True if all are hidden on purpose.
        fault: Reason why there is none, or not the intended ones, by mistake.
        fix: Advice for that case.
    """

    units: tuple[Unit, ...] = ()
    evidence: tuple[str, ...] = ()
    hidden: bool = False
    fault: str = ""
    fix: str = ""


def composite(env: Mapping[str, str]) -> bool:
    """Return True if a device is a card with all of its tiles; the driver compares whole words."""
    return env.get(HIERARCHY) == _COMPOSITE


def units_of(gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Unit]:
    """Return the devices of these GPUs, in the order in which a mask counts them."""
    if composite(env):
        return [Unit(gpu, tuple(range(gpu.tiles))) for gpu in gpus]
    return [Unit(gpu, (tile,)) for gpu in gpus for tile in range(gpu.tiles)]


def mask_of(wanted: Iterable[Unit], gpus: Sequence[Gpu], env: Mapping[str, str]) -> str:
    """Return the value of `ZE_AFFINITY_MASK` that leaves the *wanted* devices of all GPUs."""
    kept = list(wanted)
    return ",".join(str(index) for index, unit in enumerate(units_of(gpus, env)) if unit in kept)


def visible_units(gpus: Sequence[Gpu], env: Mapping[str, str]) -> Visible:
    """Return the devices that torch has in a process with the environment *env*.

    Args:
        gpus: All GPUs that the driver counts, in the bus's order.
        env: Environment of the process.
    """
    notes = _odd_hierarchy(env)
    seen = _masked(gpus, env)
    if seen.fault or seen.hidden:
        return replace(seen, evidence=(*notes, *seen.evidence))
    notes += seen.evidence
    listed = sorted(seen.units, key=lambda unit: unit.gpu.card.integrated)  # stable
    chosen = select(listed, env)
    if chosen.fault:
        return Visible(evidence=tuple(notes), fault=chosen.fault, fix=chosen.fix)
    if chosen.hidden:
        return Visible(evidence=(*notes, chosen.evidence), hidden=True)
    notes += (chosen.evidence,) if chosen.evidence else ()
    return _of_torch(chosen.units, gpus, env, notes)


def _odd_hierarchy(env: Mapping[str, str]) -> tuple[str, ...]:
    value = env.get(HIERARCHY, "")
    if value in {"", _FLAT, _COMPOSITE, _COMBINED}:
        return ()
    return (
        f"`{HIERARCHY}={value}` is none of FLAT, COMPOSITE and COMBINED: the driver ignores it",
    )


def _of_torch(
    units: Sequence[Unit], gpus: Sequence[Gpu], env: Mapping[str, str], notes: tuple[str, ...]
) -> Visible:
    """Apply torch's own rule, and check that it has kernels for the rest."""
    discrete = [unit for unit in units if not unit.gpu.card.integrated]
    if discrete and len(discrete) < len(units):
        notes += ("torch leaves the processor's GPU out, since there is a discrete one",)
    left = discrete or list(units)
    unfit = [unit for unit in left if not unit.gpu.card.usable]
    fit = [unit for unit in left if unit.gpu.card.usable]
    if not unfit:
        return Visible(tuple(left), notes)
    names = ", ".join(sorted({unit.gpu.card.name for unit in unfit}))
    if not fit:
        message = f"PyTorch has no kernels for {names}: it is older than the GPUs that it supports"
        return Visible(evidence=(message, *notes), hidden=True)
    return Visible(
        evidence=notes,
        fault=f"torch is given {names}, which PyTorch has no kernels for",
        fix=f"leave it out: `export {MASK}={mask_of(fit, gpus, env)}`",
    )


def _masked(gpus: Sequence[Gpu], env: Mapping[str, str]) -> Visible:
    """Return what `ZE_AFFINITY_MASK` leaves, in the bus's order."""
    everything = units_of(gpus, env)
    value = env.get(MASK, "").strip()
    if value in _NO_MASK:
        return Visible(tuple(everything))
    setting = f"`{MASK}={env[MASK]}`"
    entries = [part.strip() for part in value.rstrip(",").split(",")]
    if all(re.fullmatch(r"-\d+", entry) for entry in entries):
        return Visible(evidence=(f"{setting} hides {_all(everything)}",), hidden=True)
    wrong = next((entry for entry in entries if not _is_entry(entry, env)), None)
    if wrong is not None:
        return Visible(
            fault=f"{setting} cannot be read: `{wrong}` is no device, and the driver stops there",
            fix=_how(everything, gpus, env),
        )
    kept: list[Unit] = []
    ignored = []
    for entry in entries:
        found = _named(entry, everything, env)
        kept += [unit for unit in found if unit not in kept]
        if not found:
            ignored.append(entry)
    if not kept:
        return _left_with_nothing(setting, ignored, everything, gpus, env)
    units = tuple(_united(kept)) if composite(env) else tuple(kept)
    in_order = sorted(units, key=lambda unit: (gpus.index(unit.gpu), unit.tiles))
    notes = [f"{setting} leaves {_left(in_order, everything)}"]
    if ignored:
        notes.append(f"{setting}: the driver ignores `{'`, `'.join(ignored)}`: no such device")
    return Visible(tuple(in_order), tuple(notes))


def _is_entry(entry: str, env: Mapping[str, str]) -> bool:
    """Return True if the driver can read an entry; parts of a tile stop it if cards are devices."""
    found = _ENTRY.fullmatch(entry)
    return found is not None and not (found[3] and composite(env))


def _named(entry: str, everything: Sequence[Unit], env: Mapping[str, str]) -> list[Unit]:
    """Return the device that an entry names; if tiles are devices, "0.1" names none."""
    found = _ENTRY.fullmatch(entry)
    if found is None or not 0 <= int(found[1]) < len(everything):
        return []
    unit = everything[int(found[1])]
    if found[2] is None:
        return [unit]
    if not composite(env):
        return []
    return [Unit(unit.gpu, (tile,)) for tile in unit.tiles if tile == int(found[2])]


def _united(units: Iterable[Unit]) -> list[Unit]:
    """Return one device for each card, of all of its tiles that are named."""
    tiles: dict[str, tuple[Gpu, set[int]]] = {}
    for unit in units:
        tiles.setdefault(unit.gpu.address, (unit.gpu, set()))[1].update(unit.tiles)
    return [Unit(gpu, tuple(sorted(indices))) for gpu, indices in tiles.values()]


def _left_with_nothing(
    setting: str,
    ignored: Sequence[str],
    everything: Sequence[Unit],
    gpus: Sequence[Gpu],
    env: Mapping[str, str],
) -> Visible:
    """Return the fault of a mask that matches no device."""
    dotted = [entry for entry in ignored if "." in entry]
    if not dotted or composite(env):
        message = f"`{ignored[0]}` is no device here"
        return Visible(
            fault=f"{setting} hides {_all(everything)}: {message}",
            fix=_how(everything, gpus, env),
        )
    as_cards = {**env, HIERARCHY: _COMPOSITE}
    meant = _masked(gpus, as_cards).units
    flat = mask_of([Unit(unit.gpu, (tile,)) for unit in meant for tile in unit.tiles], gpus, env)
    other = f", or `export {MASK}={flat}`" if flat else ""
    return Visible(
        fault=f"{setting} hides {_all(everything)}: `{dotted[0]}` is a tile of a card, and "
        f"tiles are devices of their own here",
        fix=f"`export {HIERARCHY}={_COMPOSITE}`{other}",
    )


def _how(everything: Sequence[Unit], gpus: Sequence[Gpu], env: Mapping[str, str]) -> str:
    last = len(everything) - 1
    numbers = f"numbers from 0 to {last}" if last else "0"
    more = ", or tiles such as `0.1`," if composite(env) and any(g.tiles > 1 for g in gpus) else ""
    return f"set `{MASK}` to {numbers}{more} separated by commas, or unset it"


def _kind(units: Sequence[Unit]) -> str:
    tiled = any(unit.gpu.tiles > 1 and len(unit.tiles) == 1 for unit in units)
    return "tile" if tiled else "GPU"


def _all(units: Sequence[Unit]) -> str:
    kind = _kind(units)
    return f"the only {kind}" if len(units) == 1 else f"all {counted(len(units), kind)}"


def _left(units: Sequence[Unit], everything: Sequence[Unit]) -> str:
    """Return a text on the rest: "6 of 12 tiles, on 3 of 6 cards"."""
    message = f"{len(units)} of {counted(len(everything), _kind(everything))}"
    cards, all_cards = ({unit.gpu.address for unit in group} for group in (units, everything))
    tiles = sum(len(unit.tiles) for unit in units), sum(len(unit.tiles) for unit in everything)
    if len(everything) > len(all_cards):
        return f"{message}, on {len(cards)} of {counted(len(all_cards), 'card')}"
    if tiles[1] > len(everything):
        return f"{message}, with {tiles[0]} of {tiles[1]} tiles"
    return message
