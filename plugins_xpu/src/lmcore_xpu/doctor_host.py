"""Checks of `lmcore doctor` on the host: Aurora's modules and jobs, and what a run would use there.

Names and variables are from Argonne's public documentation (docs/how-to/aurora.md has the
pages); none of it has been read on Aurora itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.errors import counted
from lmcore.contract import Check, CheckStatus, Probe
from lmcore_xpu.detection.selector import Unit
from lmcore_xpu.detection.visible import HIERARCHY, composite
from lmcore_xpu.launch_env import launch_env, launch_problems

__all__ = ["Aurora", "aurora_checks", "read_aurora", "run_check"]

_DOMAIN = ".aurora.alcf.anl.gov"
_COMPUTE_NODE = re.compile(r"x4\d{3}c\d+s\d+b\d+n\d+", re.ASCII)
_LOGIN_NODE = re.compile(r"aurora-uan-\d+", re.ASCII)
_SOFTWARE = "/opt/aurora/"
_MODULE = re.compile(r"\bframeworks[-/](\d+(?:\.\w+)*)|aurora_frameworks-(\d+(?:\.\w+)*)", re.ASCII)
_MODULE_VARIABLES = ("ENV_NAME", "CONDA_PREFIX", "LOADEDMODULES")
_MOST_CHARACTERS = 1 << 22
_OF_EACH_PROCESS = ("CCL_LOCAL_RANK", "CCL_LOCAL_SIZE")
_KVS_MODE = "CCL_KVS_MODE"
_MPI_NOT_INITIALISED = 2026
"""First year of the module with which `CCL_KVS_MODE=mpi` needs a program that initialises MPI."""


@dataclass(frozen=True)
class Aurora:
    """A host of Aurora, as its name and variables show it.

    Attributes:
        host: Name of the host.
        login: True for a login node, False for a compute node.
        module: Version of the loaded module `frameworks`; empty if it is not loaded.
        job: Number of the PBS job; empty outside a job.
        hosts: Hosts of the job.
    """

    host: str
    login: bool
    module: str
    job: str
    hosts: tuple[str, ...]


def read_aurora(env: Mapping[str, str], host: str) -> Aurora | None:
    """Return the facts of a host of Aurora; None on another machine.

    Args:
        env: Environment of the user.
        host: Name of this host, with or without its domain.
    """
    hosts = _hosts(env.get("PBS_NODEFILE", ""))
    name = host.partition(".")[0]
    login = _LOGIN_NODE.fullmatch(name) is not None
    if not (
        login
        or _COMPUTE_NODE.fullmatch(name)
        or any(known.endswith(_DOMAIN) for known in (host, *hosts))
        or env.get("CONDA_PREFIX", "").startswith(_SOFTWARE)
    ):
        return None
    found = (_MODULE.search(env.get(variable, "")) for variable in _MODULE_VARIABLES)
    module = next((match[1] or match[2] for match in found if match), "")
    return Aurora(host, login, module, env.get("PBS_JOBID", ""), hosts)


def aurora_checks(machine: Aurora | None, env: Mapping[str, str]) -> Iterator[Check]:
    """Check the environment on Aurora, if this is a host of it."""
    if machine is None:
        return
    kind = "login" if machine.login else "compute"
    job = f"job {machine.job} on {_count(machine.hosts)}" if machine.job else "no PBS job"
    module = f"module `frameworks` {machine.module}" if machine.module else "no module `frameworks`"
    detail = f"{kind} node {machine.host}, {job}, {module}"
    wrong = list(_wrong(machine, env))
    if not wrong:
        yield Check("aurora", CheckStatus.OK, detail)
        return
    messages, fixes = zip(*wrong, strict=True)
    messages = tuple(message for message in messages if message)
    yield Check("aurora", CheckStatus.WARNING, "; ".join((detail, *messages)), "; ".join(fixes))


def run_check(
    probe: Probe,
    units: Sequence[Unit],
    env: Mapping[str, str],
    backends: Sequence[str],
    *,
    hosts: int = 1,
    slingshot: bool = False,
) -> Check:
    """Return what a run would use: devices, the backend, and the variables that lmcore sets.

    Args:
        probe: Probe that found devices.
        units: Devices that torch sees.
        env: Environment of the user.
        backends: Names of the usable communication backends, the best first.
        hosts: Number of hosts of the batch job.
        slingshot: True if this host has a card of that network.
    """
    size = str(probe.count)
    parts = [f"`lmcore train` starts {_processes(units)}", _backend(backends)]
    if backends and launch_problems({**env, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}):
        parts.append("it is refused: see `oneccl launcher`")
    elif backends:
        parts.append(_variables(probe, env, 1, slingshot=slingshot))
    if backends and hosts > 1:
        started = {**env, "PALS_RANKID": "0", "PMIX_RANK": "0"}
        sets = _variables(probe, started, hosts, slingshot=slingshot)
        parts.append(f"by `mpiexec --pmi=pmix` on {hosts} hosts, {probe.count} each, {sets}")
    return Check("run", CheckStatus.OK, "; ".join(parts))


def _wrong(machine: Aurora, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield messages and fixes; an empty message is in the description of the host."""
    if machine.login:
        yield "", "GPUs are on compute nodes: `qsub -I -q debug -l select=1 ...`"
    if not machine.module:
        yield "", "`module load frameworks`, and then activate the virtual environment"
    if composite(env):
        message = f"`{HIERARCHY}=COMPOSITE`: devices are the 6 cards of a node, not its 12 tiles"
        yield message, f"`export {HIERARCHY}=FLAT`"
    year = machine.module.partition(".")[0]
    if env.get(_KVS_MODE) == "mpi" and year.isdigit() and int(year) >= _MPI_NOT_INITIALISED:
        message = f"`{_KVS_MODE}=mpi`: this module's oneCCL then fails unless MPI is initialised"
        yield message, f"`unset {_KVS_MODE}`"


def _hosts(file: str) -> tuple[str, ...]:
    """Return the hosts of `PBS_NODEFILE`, each once, in its order."""
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as stream:
            return tuple(dict.fromkeys(stream.read(_MOST_CHARACTERS).split()))
    except OSError:
        return ()


def _count(hosts: Sequence[str]) -> str:
    return counted(len(hosts), "host") if hosts else "unknown hosts"


def _processes(units: Sequence[Unit]) -> str:
    tiled = not all(unit.whole for unit in units)
    device = "tile" if tiled else "GPU"
    if len(units) == 1:
        return f"one process, on one {device}"
    addresses = {unit.gpu.address for unit in units}
    cards = f" of {counted(len(addresses), 'card')}" if tiled else ""
    return f"{len(units)} processes, one for each {device}{cards}"


def _backend(backends: Sequence[str]) -> str:
    if not backends:
        return "no communication backend, so that a run has one process"
    others = "".join(f", `{name}` with `--distributed-backend {name}`" for name in backends[1:])
    return f"backend `{backends[0]}`{others}"


def _variables(probe: Probe, env: Mapping[str, str], hosts: int, *, slingshot: bool) -> str:
    """Return the variables that lmcore sets for rank 0, except variables that the user has set."""
    place = {"world_size": probe.count * hosts, "local_world_size": probe.count}
    wanted = launch_env(env, probe, place, slingshot=slingshot)
    sets = [
        name if name in _OF_EACH_PROCESS else f"{name}={value}"
        for name, value in wanted.items()
        if name not in env
    ]
    return f"lmcore sets {', '.join(sets)}" if sets else "lmcore sets no variable"
