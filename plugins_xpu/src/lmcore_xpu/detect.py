"""From facts to a `Probe`: is there a GPU, and can this torch use it?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lmcore.accelerator import Probe, ProbeState, TorchBuild
from lmcore_xpu.facts import LOADER, RUNTIME, Facts, Gpu

__all__ = ["VISIBLE", "probe", "torch_command", "visible_gpus"]

VISIBLE = "ZE_AFFINITY_MASK"
_INTEGRATED = "0000:00:02.0"


def probe(facts: Facts, env: Mapping[str, str]) -> Probe:
    """Return what the facts mean for a process with the environment *env*."""
    if not facts.gpus:
        evidence = ["no Intel GPU on the PCI bus"]
        return _answer(ProbeState.ABSENT, evidence, facts=_versions(facts))
    listed = [_told(one) for one in facts.gpus]
    gpus = visible_gpus(facts.gpus, env)
    if not gpus:
        hides = f"`{VISIBLE}={env[VISIBLE]}` hides all {len(facts.gpus)} GPUs"
        return _answer(ProbeState.ABSENT, [hides, *listed], facts=_versions(facts))
    if len(gpus) < len(facts.gpus):
        listed.append(f"`{VISIBLE}={env[VISIBLE]}` leaves {len(gpus)} of {len(facts.gpus)}")
    gpus = [one for one in gpus if one.access] or gpus
    fault, fix = _fault(facts, gpus)
    if fault:
        return _answer(
            ProbeState.BROKEN,
            [fault, *listed],
            fix=fix,
            count=len(gpus),
            facts=_versions(facts),
        )
    return _answer(
        ProbeState.PRESENT,
        [*listed, f"torch {facts.torch.version}, built for XPU {facts.torch.toolkit}"],
        count=len(gpus),
        facts={
            **_versions(facts),
            "gpus": [
                {"address": one.address, "device_id": one.device_id, "driver": one.driver}
                for one in gpus
            ],
        },
    )


def _versions(facts: Facts) -> dict[str, object]:
    """Return what is installed, under the names that `lmcore plugins` and `doctor` show."""
    found: dict[str, object] = {"torch_build": facts.torch.version}
    drivers = sorted({one.driver for one in facts.gpus if one.driver})
    if drivers:
        found["driver"] = f"{' and '.join(drivers)} of Linux {facts.kernel}".strip()
    if facts.torch.toolkit:
        found["runtime"] = f"oneAPI {facts.torch.toolkit}"
    return found


def _fault(facts: Facts, gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Return the first thing that keeps the GPUs from being used, and its fix."""
    first = gpus[0]
    if first.driver is None or first.node is None:
        return (
            f"no kernel driver serves the GPU at {first.address}",
            "load the `xe` or `i915` kernel module, or boot a kernel that knows this GPU",
        )
    if first.access is None:
        return (
            f"/dev/dri/{first.node} is not in this container",
            "start the container with `--device /dev/dri`",
        )
    if not first.access:
        return (
            f"this user may not open /dev/dri/{first.node}",
            "run `sudo usermod -aG render $USER` and log in again",
        )
    lacking = [
        library
        for library, there in ((LOADER, facts.loader), (RUNTIME, facts.runtime))
        if not there
    ]
    if lacking:
        return (
            f"Level Zero is not complete: `{'`, `'.join(lacking)}` cannot be loaded",
            "install Intel's GPU runtime, on Ubuntu `apt-get install libze1 libze-intel-gpu1`",
        )
    if facts.torch.toolkit is None:
        version = facts.torch.version
        built = f"torch {version} is built without XPU" if version else "no torch is installed"
        return built, f"run `{torch_command(facts.torch)}`"
    return "", ""


def torch_command(torch: TorchBuild) -> str:
    """Return the command that installs a torch for Intel GPUs, from PyTorch's own index.

    It keeps the release that is installed, if the index can have it.
    """
    published = re.fullmatch(r"\d+(\.\d+)*", torch.release)  # no nightly, no vendor's own
    wanted = f"torch=={torch.release}" if published else "torch"
    index = "https://download.pytorch.org/whl/xpu"
    return f"pip install --force-reinstall '{wanted}' --index-url {index}"


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that Level Zero would show: those whose index the mask lists.

    An entry names a GPU ("1") or a tile of one ("1.0"); the order stays that of the bus.  An
    empty mask hides nothing.
    """
    entries = [part.strip() for part in env.get(VISIBLE, "").split(",") if part.strip()]
    if not entries:
        return list(gpus)
    wanted = {entry.partition(".")[0] for entry in entries}
    return [one for index, one in enumerate(gpus) if str(index) in wanted]


def _told(gpu: Gpu) -> str:
    kind = "the processor's GPU" if gpu.address == _INTEGRATED else "Intel GPU"
    return f"{kind} {gpu.device_id} at {gpu.address}, driver {gpu.driver or 'none'}"


def _answer(
    state: ProbeState,
    evidence: Sequence[str],
    *,
    fix: str | None = None,
    count: int = 0,
    facts: Mapping[str, object] | None = None,
) -> Probe:
    return Probe("xpu", state, count, 100, tuple(evidence), fix, dict(facts or {}))
