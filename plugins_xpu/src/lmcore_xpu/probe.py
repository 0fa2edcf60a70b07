"""From facts to a `Probe`: is there a GPU, and can this torch use it?"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lmcore.contract import Probe, ProbeState, TorchBuild
from lmcore_xpu.detection.facts import LOADER, RUNTIME, Facts, Gpu
from lmcore_xpu.detection.selector import Unit
from lmcore_xpu.detection.visible import MASK, Visible, composite, mask_of, visible_units

__all__ = ["INSTALL_RUNTIME", "counted_gpus", "kinds", "mixed", "probe", "torch_command"]

INSTALL_RUNTIME = (
    "install Intel's GPU runtime, on Ubuntu `apt-get install libze1 libze-intel-gpu1`, elsewhere "
    "as https://dgpu-docs.intel.com says"
)


def probe(facts: Facts, env: Mapping[str, str]) -> Probe:
    """Return the probe of these facts in a process with the environment *env*."""
    if not facts.gpus:
        return _answer(facts, ProbeState.ABSENT, ["no Intel GPU on the PCI bus"])
    fit = [gpu for gpu in facts.gpus if gpu.card.usable]
    listed = _listed(facts.gpus)
    if not fit:
        message = "PyTorch has no kernels for this GPU: it supports Xe-HPG, Xe-HPC and newer ones"
        return _answer(facts, ProbeState.ABSENT, [message, *listed])
    if not facts.container and all(gpu.error == errno.EPERM for gpu in fit):
        # The user may open the nodes, so that it is a control group that keeps them closed.
        message = (
            f"{len(fit)} Intel GPUs are not given to this process: ask the batch system for GPUs"
        )
        return _answer(facts, ProbeState.ABSENT, [message, *listed])
    gpus = counted_gpus(facts.gpus)
    seen = visible_units(gpus, env)
    if seen.hidden:
        return _answer(facts, ProbeState.ABSENT, [*seen.evidence, *listed])
    fault, fix = _fault(facts, fit, seen)
    notes = [*listed, *seen.evidence, *_closed(fit)]
    if fault:
        return _answer(
            facts,
            ProbeState.BROKEN,
            [fault, *notes],
            fix=fix,
            count=len(seen.units) or len(fit),
        )
    different, one_kind = mixed(seen.units, gpus, env)
    built = f"torch {facts.torch.version}, built for XPU {facts.torch.toolkit}"
    return _answer(
        facts,
        ProbeState.PRESENT,
        [*notes, *([f"{different} ({one_kind})"] if different else []), built],
        count=len(seen.units),
        more={
            "hierarchy": "COMPOSITE" if composite(env) else "FLAT",
            "gpus": [_described(unit) for unit in seen.units],
        },
    )


def counted_gpus(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that Level Zero counts: supported ones that this process may open.

    If it may open none, return all supported ones, as it would count them.
    """
    known = [gpu for gpu in gpus if gpu.card.has_driver]
    return [gpu for gpu in known if gpu.access] or known


def kinds(units: Iterable[Unit]) -> Counter[str]:
    """Return how many devices there are of each model."""
    return Counter(unit.gpu.card.name for unit in units)


def mixed(units: Sequence[Unit], gpus: Sequence[Gpu], env: Mapping[str, str]) -> tuple[str, str]:
    """Return what unequal devices mean for a run, and what to do; empty where they are alike."""
    found = kinds(units)
    if len(found) < 2:
        return "", ""
    names = ", ".join(f"{count} x {name}" for name, count in found.items())
    most = found.most_common(1)[0][0]
    mask = mask_of([unit for unit in units if unit.gpu.card.name == most], gpus, env)
    message = f"different GPUs: {names}; a run waits for the slowest and has the smallest's memory"
    return message, f"`export {MASK}={mask}` leaves {most} alone"


def _fault(facts: Facts, fit: Sequence[Gpu], seen: Visible) -> tuple[str, str]:
    """Return the first thing that keeps the GPUs from being used, and its fix."""
    if not any(gpu.access for gpu in fit):
        first = min(fit, key=lambda gpu: gpu.card.integrated)  # a card before the processor's
        return _closed_gpu(facts, first)
    if seen.fault:
        return seen.fault, seen.fix
    lacking = [
        library
        for library, found in ((LOADER, facts.loader), (RUNTIME, facts.runtime))
        if not found
    ]
    if lacking:
        return (
            f"Level Zero is not complete: `{'`, `'.join(lacking)}` cannot be loaded",
            INSTALL_RUNTIME,
        )
    if facts.torch.toolkit is None:
        version = facts.torch.version
        built = f"torch {version} is built without XPU" if version else "no torch is installed"
        return built, f"run `{torch_command(facts.torch)}`"
    return "", ""


def _closed_gpu(facts: Facts, gpu: Gpu) -> tuple[str, str]:
    """Return why a GPU's node cannot be opened, and the fix."""
    if gpu.driver is None or gpu.node is None:
        linux = f" of Linux {facts.kernel}" if facts.kernel else ""
        newer = "Linux 6.12 or newer" if gpu.card.generation == "Xe2" else "a kernel"
        return (
            f"no kernel driver{linux} serves the GPU at {gpu.address}",
            f"load the `xe` or `i915` kernel module, or boot {newer} that knows {gpu.card.name}",
        )
    if gpu.access is None:
        return (
            f"{gpu.path} is not in this container",
            "start the container with `--device /dev/dri`",
        )
    if gpu.error not in {errno.EACCES, errno.EPERM}:
        message = f"{gpu.path} does not open: {os.strerror(gpu.error)}"
        return message, "see `dmesg` for the GPU's driver; reset the GPU or reboot"
    message = f"this user may not open {gpu.path}"
    if facts.container:
        return message, f"start the container with `--device /dev/dri --group-add {gpu.group}`"
    if gpu.group in {"", "root"}:
        return (
            message,
            f"let this user read and write {gpu.path}: ask the administrator of this machine",
        )
    return message, f"run `sudo usermod -aG {gpu.group} $USER` and log in again"


def _closed(gpus: Sequence[Gpu]) -> list[str]:
    """Report GPUs that this process may not open beside others that it may."""
    shut = [gpu for gpu in gpus if not gpu.access]
    if not shut or len(shut) == len(gpus):
        return []
    paths = ", ".join(gpu.path or gpu.address for gpu in shut)
    are = "is" if len(shut) == 1 else "are"
    return [f"{len(shut)} of {len(gpus)} GPUs {are} closed to this process: {paths}"]


def torch_command(torch: TorchBuild) -> str:
    """Return the command that installs a torch for Intel GPUs, from PyTorch's own index.

    It keeps the release that is installed, if the index can have it.
    """
    published = re.fullmatch(r"\d+(\.\d+)*", torch.release)  # no nightly, no vendor's own
    wanted = f"torch=={torch.release}" if published else "torch"
    index = "https://download.pytorch.org/whl/xpu"
    return f"pip install --force-reinstall '{wanted}' --index-url {index}"


def _listed(gpus: Sequence[Gpu]) -> list[str]:
    """Return a line for each kind of GPU: how many, which, where, and under which driver."""
    groups: dict[tuple[object, ...], list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault((gpu.device_id, gpu.driver, gpu.tiles, gpu.card), []).append(gpu)
    return [_line(group) for group in groups.values()]


def _line(gpus: Sequence[Gpu]) -> str:
    first = gpus[0]
    owner = "the processor's " if first.card.integrated else ""
    number = f"{len(gpus)} x " if len(gpus) > 1 else ""
    tiles = f" of {first.tiles} tiles" if first.tiles > 1 else ""
    addresses = ", ".join(gpu.address for gpu in gpus)
    known = f" ({first.device_id})" if first.device_id not in first.card.name else ""
    summary = f"{number}{owner}{first.card.name}{known}{tiles}"
    return f"{summary} at {addresses}, driver {first.driver or 'none'}"


def _described(unit: Unit) -> dict[str, object]:
    """Return a device for `Probe.facts`, in JSON values."""
    return {
        "name": unit.gpu.card.name,
        "generation": unit.gpu.card.generation,
        "integrated": unit.gpu.card.integrated,
        "address": unit.gpu.address,
        "device_id": unit.gpu.device_id,
        "driver": unit.gpu.driver,
        "tiles": list(unit.tiles),
        "tiles_of_card": unit.gpu.tiles,
        "memory": unit.memory,
    }


def _versions(facts: Facts) -> dict[str, object]:
    """Return the installed versions, under the names that `lmcore plugins` and `doctor` show."""
    found: dict[str, object] = {"torch_build": facts.torch.version}
    drivers = sorted({gpu.driver for gpu in facts.gpus if gpu.driver})
    if drivers:
        found["driver"] = f"{' and '.join(drivers)} of Linux {facts.kernel}".strip()
    if facts.torch.toolkit:
        found["runtime"] = f"oneAPI {facts.torch.toolkit}"
    return found


def _answer(
    facts: Facts,
    state: ProbeState,
    evidence: Sequence[str],
    *,
    fix: str | None = None,
    count: int = 0,
    more: Mapping[str, object] | None = None,
) -> Probe:
    found = _versions(facts) | dict(more or {})
    return Probe("xpu", state, count, 100, tuple(evidence), fix, found)
