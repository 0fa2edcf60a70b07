"""Probe of NVIDIA GPUs: from facts to present, absent or broken, with evidence and fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcore.contract import Probe, ProbeState
from lmcore_cuda.detection.architectures import capability_words
from lmcore_cuda.detection.facts import DeniedFile, Facts
from lmcore_cuda.detection.torch_fit import dotted, torch_fault
from lmcore_cuda.detection.visible import visible_gpus
from lmcore_cuda.driver.nvml import (
    DRIVER_NOT_LOADED,
    NO_PERMISSION,
    OPERATING_SYSTEM,
    UNKNOWN,
    Gpu,
    GpuFault,
)

__all__ = ["probe"]

_REBOOT = "reboot, so that kernel module and libraries are of one version; see `nvidia-smi`"
_MENDS = {
    OPERATING_SYSTEM: "restart the container or the job: it has lost its GPUs",
    UNKNOWN: "in a container: restart it, it has lost its GPUs; elsewhere: reboot; see "
    "`nvidia-smi`",
    802: "start `nvidia-fabricmanager` of the driver's version: GPUs behind NVSwitch need it",
}
"""Fixes by status of NVML, or of CUDA (802: system not initialized)."""


def probe(facts: Facts, env: Mapping[str, str]) -> Probe:
    """Return the probe's answer for a process with the environment *env*."""
    driver = facts.driver
    if facts.denied and not driver.gpus:
        return _denied(facts)
    if not driver.library or driver.status == DRIVER_NOT_LOADED:
        return _without_driver(facts)
    if driver.status:
        evidence = [f"the NVIDIA driver does not answer: {driver.message}", *_bus(facts)]
        return _answer(facts, ProbeState.BROKEN, evidence, fix=_MENDS.get(driver.status, _REBOOT))
    return _with_driver(facts, env)


def _with_driver(facts: Facts, env: Mapping[str, str]) -> Probe:
    """Return the answer for a driver that works."""
    driver, driver_summary = facts.driver, _driver_words(facts)
    if not driver.gpus:
        return _without_gpus(facts, driver_summary)
    if driver.already_visible:
        return _usable(facts, driver.gpus, [driver_summary])
    seen = visible_gpus(driver.gpus, env)
    if seen.hidden:
        return _answer(facts, ProbeState.ABSENT, [seen.evidence, driver_summary])
    if seen.fault:
        return _answer(facts, ProbeState.BROKEN, [seen.fault, driver_summary], fix=seen.fix)
    lost = [_fault_words(fault) for fault in driver.faults]
    return _usable(facts, seen.gpus, [driver_summary, *filter(None, (seen.evidence,)), *lost])


def _usable(facts: Facts, gpus: Sequence[Gpu], said: Sequence[str]) -> Probe:
    """Return the answer for visible GPUs: present if torch fits them, else broken."""
    names = f"{len(gpus)} x {gpus[0].name}" if _alike(gpus) else ", ".join(gpu.name for gpu in gpus)
    evidence = [f"{names} ({said[0]})", *said[1:]]
    fault, fix = torch_fault(facts, gpus)
    if fault:
        return _answer(facts, ProbeState.BROKEN, [*evidence, fault], fix=fix, count=len(gpus))
    evidence.append(f"torch {facts.torch.version}, built with CUDA {facts.torch.toolkit}")
    return _answer(
        facts,
        ProbeState.PRESENT,
        evidence,
        count=len(gpus),
        gpus=[
            {
                "name": gpu.name,
                "uuid": gpu.uuid,
                "memory": gpu.memory,
                "capability": capability_words([gpu.capability]),
            }
            for gpu in gpus
        ],
    )


def _driver_words(facts: Facts) -> str:
    driver = facts.driver
    version = f" {driver.version}" if driver.version else ""
    return f"NVIDIA driver{version}, for CUDA up to {dotted(driver.cuda)}"


def _without_driver(facts: Facts) -> Probe:
    message = facts.driver.message
    if not facts.bus:
        return _answer(
            facts, ProbeState.ABSENT, ["no NVIDIA GPU on the PCI bus", f"no driver: {message}"]
        )
    return _answer(
        facts,
        ProbeState.BROKEN,
        [*_bus(facts), f"no driver: {message}"],
        fix="install the NVIDIA driver (in a container: start it with `--gpus all`) until "
        "`nvidia-smi` lists the GPU",
    )


def _denied(facts: Facts) -> Probe:
    """Return the answer for device files that this user may not open."""
    files = ", ".join(f"`{node.path}`" for node in facts.denied)
    return _answer(
        facts,
        ProbeState.BROKEN,
        [f"this user may not open {files}", *_bus(facts)],
        fix=_join_group(facts.denied),
    )


def _join_group(denied: Sequence[DeniedFile]) -> str:
    groups = {node.group for node in denied} - {"", "root"}
    if len(groups) == 1:
        return f"run `sudo usermod -aG {groups.pop()} $USER`, and log in again"
    return f"let this user read and write `{denied[0].path}`: ask the administrator of this machine"


def _without_gpus(facts: Facts, driver_summary: str) -> Probe:
    """Return the answer for a driver that works and lists no GPU."""
    faults = facts.driver.faults
    if not faults:
        return _answer(facts, ProbeState.ABSENT, [f"{driver_summary}: it lists no GPU"])
    if all(fault.status == NO_PERMISSION for fault in faults):
        # The files may be opened, so it is a control group that keeps them from this process.
        theirs = "GPU is" if len(faults) == 1 else f"{len(faults)} GPUs are"
        message = f"{driver_summary}: its {theirs} not given to this process"
        return _answer(facts, ProbeState.ABSENT, [message, "ask the batch system for GPUs"])
    return _answer(
        facts,
        ProbeState.BROKEN,
        [driver_summary, *(_fault_words(fault) for fault in faults)],
        fix="reset the GPU (`sudo nvidia-smi --gpu-reset`) or reboot; see `dmesg` for `Xid`",
    )


def _fault_words(fault: GpuFault) -> str:
    return f"GPU at place {fault.index} on the bus: {fault.message}"


def _alike(gpus: Sequence[Gpu]) -> bool:
    return len({gpu.name for gpu in gpus}) == 1


def _bus(facts: Facts) -> list[str]:
    return [f"NVIDIA GPU on the PCI bus at {', '.join(facts.bus)}"] if facts.bus else []


def _versions(facts: Facts) -> dict[str, object]:
    """Return the installed versions, by the names that `lmcore plugins` and `doctor` show."""
    found: dict[str, object] = {"torch_build": facts.torch.version}
    if facts.driver.version:
        found |= {"driver": facts.driver.version}
    if facts.driver.cuda[0]:
        found |= {"driver_cuda": dotted(facts.driver.cuda)}
    if facts.torch.toolkit:
        found["runtime"] = f"CUDA {facts.torch.toolkit}"
    return found


def _answer(
    facts: Facts,
    state: ProbeState,
    evidence: Sequence[str],
    *,
    fix: str | None = None,
    count: int = 0,
    gpus: Sequence[Mapping[str, object]] | None = None,
) -> Probe:
    found = _versions(facts) | ({"gpus": list(gpus)} if gpus is not None else {})
    return Probe("cuda", state, count, 100, tuple(evidence), fix, found)
