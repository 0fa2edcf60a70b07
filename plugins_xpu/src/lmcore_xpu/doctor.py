"""Checks of `lmcore doctor` on Intel GPUs; they run in a separate process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from lmcore.base.errors import counted
from lmcore.contract import Check, CheckStatus, Probe, ProbeState
from lmcore.contract.op.packages import Packages
from lmcore_xpu.comm import environment_problem, why_no_xccl
from lmcore_xpu.detection.facts import LOADER, RUNTIME, Facts, Gpu, read_facts
from lmcore_xpu.detection.host import foreign_runtime, read_host
from lmcore_xpu.detection.selector import SELECTOR, Unit
from lmcore_xpu.detection.visible import HIERARCHY, MASK, visible_units
from lmcore_xpu.doctor_ccl import ccl_checks
from lmcore_xpu.doctor_host import aurora_checks, read_aurora, run_check
from lmcore_xpu.packages import BINDINGS, PACKAGES, installed_packages
from lmcore_xpu.probe import INSTALL_RUNTIME, counted_gpus, mixed, torch_command

__all__ = ["checks"]

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_XPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SEGMENTS = "expandable_segments"


def checks(probe: Probe) -> list[Check]:
    """Return checks of nodes, libraries, torch, variables and packages; the core tries the GPU."""
    facts, env = read_facts(), os.environ
    aurora = read_aurora(env, socket.gethostname())
    found = [*aurora_checks(aurora, env)]
    found += [_nodes(facts, probe), _libraries(facts, probe), _build(facts, probe)]
    gpus = counted_gpus(facts.gpus)
    found += _variables(gpus, env)
    if probe.state is not ProbeState.PRESENT:
        return found
    units = visible_units(gpus, env).units
    found.append(_seen(units, gpus, env))
    found += _unequal(units, gpus, env)
    found += _runtime(facts, env)
    found += _allocator(units, env)
    packages, host = installed_packages(), read_host()
    found += _packages(packages, env)
    found.append(_xccl())
    hosts = len(aurora.hosts) if aurora is not None else 1
    usable = _backends(packages, env)
    found.append(run_check(probe, units, env, usable, hosts=hosts, slingshot=host.slingshot))
    return found + ccl_checks([unit.gpu.card for unit in units], env, host)


def _missing(probe: Probe) -> CheckStatus:
    """Return the status of a missing part: skipped if there is no GPU."""
    broken = probe.state is ProbeState.BROKEN
    return CheckStatus.FAILED if broken else CheckStatus.SKIPPED


def _fix(probe: Probe, wanted: str) -> str | None:
    """Return the fix: the probe's, or the needs of an Intel GPU if there is none yet."""
    if probe.state is ProbeState.ABSENT:
        return f"for an Intel GPU: {wanted}"
    return probe.fix


def _nodes(facts: Facts, probe: Probe) -> Check:
    if not facts.gpus:
        return Check("device nodes", CheckStatus.SKIPPED, "no Intel GPU on the PCI bus")
    usable = [gpu for gpu in facts.gpus if gpu.access]
    detail = f"{len(usable)} of {counted(len(facts.gpus), 'GPU')} can be opened by this user"
    if len(usable) == len(facts.gpus):
        return Check("device nodes", CheckStatus.OK, detail)
    closed = next(gpu for gpu in facts.gpus if not gpu.access)
    if not usable:
        return Check("device nodes", _missing(probe), detail, probe.fix)
    fix = f"see who may open {closed.path or closed.address}, or leave it out with `{MASK}`"
    return Check("device nodes", CheckStatus.WARNING, detail, fix)


def _libraries(facts: Facts, probe: Probe) -> Check:
    loaded = {LOADER: facts.loader, RUNTIME: facts.runtime}
    detail = ", ".join(
        f"{name} {'found' if found else 'missing'}" for name, found in loaded.items()
    )
    if all(loaded.values()):
        return Check("level zero", CheckStatus.OK, detail)
    return Check("level zero", _missing(probe), detail, _fix(probe, INSTALL_RUNTIME))


def _build(facts: Facts, probe: Probe) -> Check:
    torch = facts.torch
    if torch.toolkit is not None:
        return Check("torch build", CheckStatus.OK, f"torch {torch.version}, XPU {torch.toolkit}")
    built = f"torch {torch.version} is built without XPU" if torch.version else "no torch"
    return Check(
        "torch build", _missing(probe), built, _fix(probe, f"run `{torch_command(torch)}`")
    )


def _variables(gpus: Sequence[Gpu], env: Mapping[str, str]) -> Iterator[Check]:
    """Report the effect of the variables that select devices, if one is set."""
    chosen = [name for name in (MASK, SELECTOR, HIERARCHY) if name in env]
    if not chosen or not gpus:
        return
    name, seen = " and ".join(chosen), visible_units(gpus, env)
    if seen.fault:
        yield Check(name, CheckStatus.FAILED, seen.fault, seen.fix)
        return
    odd = [line for line in seen.evidence if "the driver ignores" in line]
    if odd:
        yield Check(name, CheckStatus.WARNING, "; ".join(odd), "leave out what is no device")
        return
    message = "; ".join(seen.evidence) or f"leaves {counted(len(seen.units), 'device')}"
    yield Check(name, CheckStatus.OK, message)


def _seen(units: Sequence[Unit], gpus: Sequence[Gpu], env: Mapping[str, str]) -> Check:
    """Compare the devices that torch sees with the expected ones."""
    from torch import xpu

    expected, present = len(units), sum(gpu.tiles for gpu in gpus)
    tiles = sum(len(unit.tiles) for unit in units)
    count = xpu.device_count()
    of = f"{counted(present, 'tile')} on {counted(len(gpus), 'card')}"
    detail = f"torch sees {count}; {tiles} of {of} {'is' if tiles == 1 else 'are'} left"
    if count == expected:
        return Check("devices", CheckStatus.OK, detail)
    fix = "see `sycl-ls`; the driver may be older than a card, or another process's cgroup has it"
    if SELECTOR in env or MASK in env:
        fix = f"start without `{MASK}` and `{SELECTOR}` to see which hides what; {fix}"
    return Check("devices", CheckStatus.WARNING, f"{detail}: {expected} are expected", fix)


def _unequal(units: Sequence[Unit], gpus: Sequence[Gpu], env: Mapping[str, str]) -> Iterator[Check]:
    different, fix = mixed(units, gpus, env)
    if different:
        yield Check("equal devices", CheckStatus.WARNING, different, fix)


def _runtime(facts: Facts, env: Mapping[str, str]) -> Iterator[Check]:
    """Warn of a toolkit's libraries that are found before the libraries of torch's wheel."""
    folder = foreign_runtime(env)
    if folder is None or not facts.torch.version.endswith("+xpu"):
        return
    detail = (
        f"`LD_LIBRARY_PATH` has another SYCL runtime, in {folder}, before that of torch's wheel"
    )
    fix = (
        "if torch fails with `undefined symbol` or a UR error: start without oneAPI's `setvars.sh`"
    )
    yield Check("sycl runtime", CheckStatus.WARNING, detail, fix)


def _allocator(units: Sequence[Unit], env: Mapping[str, str]) -> Iterator[Check]:
    """Warn of expandable segments on Arc cards, which fail with some drivers."""
    name = next(
        (name for name in _ALLOCATOR if f"{_SEGMENTS}:true" in env.get(name, "").lower()), None
    )
    if name is None:
        return
    arcs = sorted({unit.gpu.card.name for unit in units if unit.gpu.card.is_arc})
    if not arcs:
        yield Check("allocator", CheckStatus.OK, f"`{name}={env[name]}`")
        return
    detail = f"`{_SEGMENTS}` has failed on Arc cards (intel/torch-xpu-ops#4427): {', '.join(arcs)}"
    fix = f"leave `{_SEGMENTS}` out of `{name}`"
    yield Check("allocator", CheckStatus.WARNING, detail, fix)


def _packages(packages: Packages, env: Mapping[str, str]) -> Iterator[Check]:
    """Return a check for each package that lmcore could use and that is installed."""
    for name, package in packages.items():
        unset = environment_problem(env) if name == BINDINGS else None
        if package.problem is not None:
            fix = PACKAGES[name].install or f"`pip uninstall {PACKAGES[name].distributions[0]}`"
            yield Check(name, CheckStatus.WARNING, package.problem, fix)
        elif unset is not None:
            fix = "that, or `--distributed-backend xccl`, the default"
            yield Check(name, CheckStatus.WARNING, unset, fix)
        else:
            yield Check(name, CheckStatus.OK, package.version or "installed, without a version")


def _backends(packages: Packages, env: Mapping[str, str]) -> list[str]:
    """Return the usable communication backends, the best first; the bindings are not imported."""
    found = ["xccl"] if why_no_xccl() is None else []
    bindings = packages.get(BINDINGS)
    if bindings is not None and bindings.problem is None and environment_problem(env) is None:
        found.append("ccl")
    return found


def _xccl() -> Check:
    """Return the check of torch's XCCL, with what lmcore does about its known faults."""
    reason = why_no_xccl()
    if reason is not None:
        fix = "several GPUs need a torch with XCCL, as PyTorch's Linux builds for XPU are"
        return Check("xccl", CheckStatus.WARNING, reason, fix)
    return Check(
        "xccl",
        CheckStatus.OK,
        "lmcore names the device when it makes the group (without, sharded training has hung), and "
        "sums and divides (oneCCL does not average on every path, intel/torch-xpu-ops#2361)",
    )
