"""Checks of `lmcore doctor` on the GPUs; they run in a separate process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from lmcore.base.errors import counted
from lmcore.contract import Check, CheckStatus, Probe, ProbeState
from lmcore.contract.op.packages import Packages
from lmcore_cuda.comm import nccl_version, why_no_nccl
from lmcore_cuda.detection.facts import Facts, read_facts
from lmcore_cuda.detection.torch_fit import without_kernels
from lmcore_cuda.detection.visible import VISIBLE, visible_gpus
from lmcore_cuda.driver.gpu_use import GpuUse, in_gib, read_use
from lmcore_cuda.driver.nvml import load_library
from lmcore_cuda.packages import PACKAGES, installed_packages

__all__ = ["checks"]

_MUCH = 0.1
_LITTLE_POWER = 0.9


def checks(probe: Probe) -> list[Check]:
    """Return the checks of driver, torch's build and each GPU; the core tests the device."""
    facts = read_facts()
    found = [_driver(facts, probe), _build(facts, probe)]
    found += _visible(facts, os.environ)
    found += [
        Check("device file", CheckStatus.WARNING, f"`{node.path}` may not be opened", probe.fix)
        for node in facts.denied
        if facts.driver.gpus
    ]
    if probe.state is not ProbeState.PRESENT:
        return found
    library = load_library()
    for number, gpu in enumerate(probe.facts.get("gpus", [])):
        found += _gpu(number, read_use(library, str(gpu["uuid"])))
    return [*found, *_packages(installed_packages()), _nccl()]


def _packages(packages: Packages) -> list[Check]:
    """Return a check for each kernel package that is installed."""
    return [
        Check(name, CheckStatus.WARNING, package.problem, PACKAGES[name].install)
        if package.problem
        else Check(name, CheckStatus.OK, package.version or "installed, without a version")
        for name, package in packages.items()
    ]


def _driver(facts: Facts, probe: Probe) -> Check:
    driver = facts.driver
    if not driver.library or driver.status:
        status = CheckStatus.FAILED if probe.state is ProbeState.BROKEN else CheckStatus.SKIPPED
        return Check("driver", status, driver.message, probe.fix)
    cuda = ".".join(str(part) for part in driver.cuda)
    gpus = counted(len(driver.gpus), "GPU")
    detail = f"{driver.version or 'version unknown'}, {gpus}, CUDA up to {cuda}"
    if driver.faults:
        lost = "; ".join(f"place {fault.index}: {fault.message}" for fault in driver.faults)
        fix = "see `dmesg` for `Xid`; GPUs that a batch system keeps from this job count too"
        return Check("driver", CheckStatus.WARNING, f"{detail}; not usable: {lost}", fix)
    if driver.already_visible:
        fix = "in a container, set `NVIDIA_DRIVER_CAPABILITIES=compute,utility`"
        return Check("driver", CheckStatus.WARNING, f"{detail}; {driver.message}", fix)
    return Check("driver", CheckStatus.OK, detail)


def _build(facts: Facts, probe: Probe) -> Check:
    torch = facts.torch
    if torch.toolkit is None:
        needed = bool(facts.driver.gpus) and probe.state is ProbeState.BROKEN
        status = CheckStatus.FAILED if needed else CheckStatus.SKIPPED
        built = f"torch {torch.version} is built without CUDA" if torch.version else "no torch"
        return Check("torch build", status, built, probe.fix)
    detail = f"torch {torch.version}, CUDA {torch.toolkit}"
    if facts.architectures:
        detail += f", for {' '.join(facts.architectures)}"
    unfit = without_kernels(facts.architectures, [gpu.capability for gpu in facts.driver.gpus])
    if not unfit:
        return Check("torch build", CheckStatus.OK, detail)
    names = ", ".join(sorted({facts.driver.gpus[number].name for number in unfit}))
    broken = probe.state is ProbeState.BROKEN
    status = CheckStatus.FAILED if broken else CheckStatus.WARNING
    return Check("torch build", status, f"{detail}; no kernels for {names}", probe.fix)


def _visible(facts: Facts, env: Mapping[str, str]) -> Iterator[Check]:
    """Report the effect of `CUDA_VISIBLE_DEVICES`, if it is set."""
    if VISIBLE not in env or not facts.driver.gpus or facts.driver.already_visible:
        return
    seen = visible_gpus(facts.driver.gpus, env)
    if seen.fault:
        yield Check(VISIBLE, CheckStatus.FAILED, seen.fault, seen.fix)
    elif "stops there" in seen.evidence:
        fix = f"leave what is no GPU out of `{VISIBLE}`"
        yield Check(VISIBLE, CheckStatus.WARNING, seen.evidence, fix)
    else:
        yield Check(VISIBLE, CheckStatus.OK, seen.evidence)


def _gpu(number: int, use: GpuUse | None) -> list[Check]:
    """Return the check of a GPU by NVML: memory of other processes, power, clock."""
    name = f"cuda:{number}"
    if use is None:
        return [Check(f"{name} memory", CheckStatus.SKIPPED, "NVML does not tell")]
    found = [_memory(f"{name} memory", use)]
    if (
        use.power_limit
        and use.power_default
        and use.power_limit < _LITTLE_POWER * (use.power_default)
    ):
        detail = f"{use.power_limit:.0f} W of {use.power_default:.0f} W are allowed"
        fix = f"`sudo nvidia-smi -i {number} -pl {use.power_default:.0f}` gives it its full speed"
        found.append(Check(f"{name} power", CheckStatus.WARNING, detail, fix))
    if use.slowdowns:
        detail = f"slowed down now by {', '.join(use.slowdowns)}"
        fix = "look after cooling and power supply: `nvidia-smi -q -d PERFORMANCE`"
        found.append(Check(f"{name} clock", CheckStatus.WARNING, detail, fix))
    return found


def _memory(name: str, use: GpuUse) -> Check:
    if use.used <= _MUCH * use.total:
        return Check(name, CheckStatus.OK, f"{in_gib(use.total - use.used)} of {in_gib(use.total)}")
    fix = "end what is not needed, or choose other GPUs with `CUDA_VISIBLE_DEVICES`"
    return Check(name, CheckStatus.WARNING, use.words, fix)


def _nccl() -> Check:
    reason = why_no_nccl()
    if reason is not None:
        fix = "several GPUs need a torch with NCCL, as PyTorch's Linux builds are"
        return Check("nccl", CheckStatus.WARNING, reason, fix)
    try:
        version: Any = nccl_version()
    except (AttributeError, RuntimeError) as error:
        return Check("nccl", CheckStatus.FAILED, f"{type(error).__name__}: {error}")
    return Check("nccl", CheckStatus.OK, f"version {version}")
