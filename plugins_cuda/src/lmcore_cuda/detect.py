"""From facts to a `Probe`: is there a GPU, and can this torch use it?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lmcore.accelerator import Probe, ProbeState, TorchBuild
from lmcore_cuda.facts import Facts
from lmcore_cuda.nvml import DRIVER_NOT_LOADED, Gpu

__all__ = ["VISIBLE", "probe", "torch_command", "visible_gpus"]

VISIBLE = "CUDA_VISIBLE_DEVICES"

_WHEELS: tuple[tuple[tuple[int, int], str], ...] = (((13, 0), "cu130"), ((12, 6), "cu126"))
"""PyTorch's builds by the CUDA version that the driver must be able to run, newest first."""


def probe(facts: Facts, env: Mapping[str, str]) -> Probe:
    """Return what the facts mean for a process with the environment *env*."""
    driver = facts.driver
    if not driver.library or driver.status == DRIVER_NOT_LOADED:
        return _without_driver(facts)
    if driver.status:
        return _answer(
            ProbeState.BROKEN,
            [f"the NVIDIA driver does not answer: {driver.message}", *_bus(facts)],
            fix="reboot, so that kernel module and libraries are of one version; see `nvidia-smi`",
            facts=_versions(facts),
        )
    here = f"NVIDIA driver {driver.version}, for CUDA up to {_dotted(driver.cuda)}"
    if not driver.gpus:
        return _answer(ProbeState.ABSENT, [f"{here}: it lists no GPU"], facts=_versions(facts))
    gpus = visible_gpus(driver.gpus, env)
    hidden = f"{VISIBLE}={env[VISIBLE]}" if VISIBLE in env else ""
    if not gpus:
        evidence = [f"`{hidden}` hides all {len(driver.gpus)} GPUs", here]
        return _answer(ProbeState.ABSENT, evidence, facts=_versions(facts))
    names = f"{len(gpus)} x {gpus[0].name}" if _alike(gpus) else ", ".join(one.name for one in gpus)
    evidence = [f"{names} ({here})"]
    evidence += [f"`{hidden}` leaves {len(gpus)} of {len(driver.gpus)}"] if hidden else []
    torch_fault, fix = _torch_fault(facts.torch, driver.cuda)
    if torch_fault:
        evidence.append(torch_fault)
        return _answer(
            ProbeState.BROKEN, evidence, fix=fix, count=len(gpus), facts=_versions(facts)
        )
    evidence.append(f"torch {facts.torch.version}, built with CUDA {facts.torch.toolkit}")
    return _answer(
        ProbeState.PRESENT,
        evidence,
        count=len(gpus),
        facts={
            **_versions(facts),
            "gpus": [{"name": one.name, "uuid": one.uuid, "memory": one.memory} for one in gpus],
        },
    )


def _versions(facts: Facts) -> dict[str, object]:
    """Return what is installed, under the names that `lmcore plugins` and `doctor` show."""
    found: dict[str, object] = {"torch_build": facts.torch.version}
    if facts.driver.version:
        found |= {"driver": facts.driver.version, "driver_cuda": _dotted(facts.driver.cuda)}
    if facts.torch.toolkit:
        found["runtime"] = f"CUDA {facts.torch.toolkit}"
    return found


def _without_driver(facts: Facts) -> Probe:
    said = facts.driver.message
    if not facts.bus:
        evidence = ["no NVIDIA GPU on the PCI bus", f"no driver: {said}"]
        return _answer(ProbeState.ABSENT, evidence, facts=_versions(facts))
    return _answer(
        ProbeState.BROKEN,
        [*_bus(facts), f"no driver: {said}"],
        fix="install the NVIDIA driver (in a container: start it with `--gpus all`) until "
        "`nvidia-smi` lists the GPU",
        facts=_versions(facts),
    )


def _torch_fault(torch: TorchBuild, driver_cuda: tuple[int, int]) -> tuple[str, str]:
    """Return why torch cannot use the GPUs, and the fix; both empty when it can."""
    command = torch_command(torch, driver_cuda)
    oldest = _dotted(_WHEELS[-1][0])
    newer_driver = f"update the NVIDIA driver to one for CUDA {oldest} or newer"
    if torch.toolkit is None:
        built = f"torch {torch.version} is built without CUDA" if torch.version else "no torch"
        return built, f"run `{command}`" if command else newer_driver
    # Within a major version, CUDA programs run on older drivers; across majors they do not.
    if int(torch.toolkit.partition(".")[0]) > driver_cuda[0]:
        fault = (
            f"torch {torch.version} is built with CUDA {torch.toolkit}, "
            f"and the driver runs at most {_dotted(driver_cuda)}"
        )
        return fault, f"update the NVIDIA driver, or run `{command}`" if command else newer_driver
    return "", ""


def torch_command(torch: TorchBuild, driver_cuda: tuple[int, int]) -> str:
    """Return the command that installs a torch for this driver, from PyTorch's own index.

    It keeps the release that is installed, if the index can have it.  Empty where PyTorch has no
    build for a driver so old.
    """
    for needed, name in _WHEELS:
        if driver_cuda >= needed:
            wanted = f"torch=={torch.release}" if _is_release(torch.release) else "torch"
            index = f"https://download.pytorch.org/whl/{name}"
            return f"pip install --force-reinstall '{wanted}' --index-url {index}"
    return ""


def _is_release(version: str) -> bool:
    """Say whether it is a published version, not a nightly one or a vendor's own."""
    return re.fullmatch(r"\d+(\.\d+)*", version) is not None


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA would show, in its order.

    As CUDA does: entries are indices or beginnings of a UUID; the first that fits no GPU ends the
    list, and one named twice empties it.  A part of a GPU (`MIG-...`) stands for its GPU.
    """
    if VISIBLE not in env:
        return list(gpus)
    found: list[Gpu] = []
    for entry in (part.strip() for part in env[VISIBLE].split(",")):
        if entry.startswith("MIG-"):
            found.append(_mig_parent(gpus, entry))
            continue
        match = [one for one in gpus if entry == str(one.index) or _begins(one.uuid, entry)]
        if len(match) != 1:
            break
        if match[0] in found:
            return []
        found += match
    return found


def _begins(uuid: str, entry: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)


def _mig_parent(gpus: Sequence[Gpu], entry: str) -> Gpu:
    """Return the GPU that a MIG name mentions (drivers before 470), else the first."""
    return next((one for one in gpus if one.uuid in entry), gpus[0])


def _alike(gpus: Sequence[Gpu]) -> bool:
    return len({one.name for one in gpus}) == 1


def _bus(facts: Facts) -> list[str]:
    return [f"NVIDIA GPU on the PCI bus at {', '.join(facts.bus)}"] if facts.bus else []


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _answer(
    state: ProbeState,
    evidence: Sequence[str],
    *,
    fix: str | None = None,
    count: int = 0,
    facts: Mapping[str, object] | None = None,
) -> Probe:
    return Probe("cuda", state, count, 100, tuple(evidence), fix, dict(facts or {}))
