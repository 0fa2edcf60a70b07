"""Environment variables of a worker, set before torch is imported; torch-free.

The core keeps every variable that the user has set.  A group of variables that belong together is
the user's as soon as one of them is set: half of ours beside half of theirs is what hangs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmcore.contract import Probe, Problem
from lmcore_xpu.detection.selector import SELECTOR
from lmcore_xpu.detection.visible import MASK

__all__ = [
    "LAUNCHER",
    "LAUNCH_GROUP",
    "TRANSPORT",
    "launch_env",
    "launch_problems",
    "launcher_of",
    "unset_command",
]

LAUNCHER, TRANSPORT = "CCL_PROCESS_LAUNCHER", "CCL_ATL_TRANSPORT"

LAUNCH_GROUP = (
    LAUNCHER,
    TRANSPORT,
    "CCL_LOCAL_RANK",
    "CCL_LOCAL_SIZE",
    "CCL_KVS_MODE",
    "CCL_KVS_USE_MPI_RANKS",
)
"""Variables by which oneCCL's processes find their ranks and each other."""

_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PMIX = ("PMIX_NAMESPACE", "PMIX_RANK")
_LOCAL_SIZES = ("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS")
_PALS = ("PALS_APID", "PALS_RANKID")

_SLINGSHOT = {
    # libfabric's provider for the card, which else may take sockets over another network.
    "FI_PROVIDER": "cxi",
    # Messages that come before they are asked for: software matches where the card is full
    "FI_CXI_RX_MATCH_MODE": "hybrid",
    # Room for completions, which the default has too little of for collectives of many ranks.
    "FI_CXI_DEFAULT_CQ_SIZE": "1048576",
    # Seconds for the processes of many hosts to meet.
    "CCL_KVS_CONNECTION_TIMEOUT": "600",
}
"""Variables of Argonne's guide for Aurora's network, without choices of algorithms."""


def launch_env(
    env: Mapping[str, str], probe: Probe, rank_info: Mapping[str, Any], *, slingshot: bool = False
) -> dict[str, str]:
    """Return the variables that a worker is to have beside its own.

    Args:
        env: Environment that the worker has.
        probe: Probe of the launcher.
        rank_info: rank, local_rank, world_size and local_world_size.
        slingshot: True if this host has a card of that network.
    """
    wanted: dict[str, str] = {}
    if MASK not in env and not re.search(r"\d", env.get(SELECTOR, "")):
        # The numbers are the bus's, and those that the probe shows.  Beside a mask or a selector
        # with numbers it would change their meaning.
        wanted[_ORDER] = "1"
    world_size, local_world_size = (
        int(rank_info.get(name, 1)) for name in ("world_size", "local_world_size")
    )
    if world_size == 1:
        return wanted
    wanted |= _launcher(env, rank_info)
    if local_world_size > 1 and not _all_linked(probe.facts.get("gpus", [])):
        # Cards without links between them: with oneCCL's default, pidfd, sharded training of larger
        # models has hung in its first broadcast (intel/torch-xpu-ops#4238).
        wanted["CCL_ZE_IPC_EXCHANGE"] = "sockets"
    if slingshot and world_size > local_world_size and "cxi" in env.get("FI_PROVIDER", "cxi"):
        wanted |= _SLINGSHOT
    return wanted


def launcher_of(env: Mapping[str, str], local_world_size: int | None = None) -> str:
    """Return the value of `CCL_PROCESS_LAUNCHER` that fits the launcher of this process.

    Args:
        env: Environment of the process.
        local_world_size: Number of processes of the run on this host; None: unknown.

    Returns:
        "pmix" if a PMIx server started it, "hydra" for Intel MPI, else "none": lmcore (also in a
        single process of those launchers), torchrun, srun, or PALS without PMIx.
    """
    stated = next((env[name] for name in _LOCAL_SIZES if env.get(name)), None)
    if None not in {stated, local_world_size} and stated != str(local_world_size):
        return "none"
    if _any(_PMIX, env):
        return "pmix"
    return "hydra" if _any(_HYDRA, env) else "none"


def unset_command(env: Mapping[str, str]) -> str:
    """Return the command after which lmcore sets oneCCL's variables for ranks itself."""
    return f"`unset {' '.join(name for name in LAUNCH_GROUP if name in env)}`"


def launch_problems(env: Mapping[str, str]) -> list[Problem]:
    """Return why oneCCL could not connect the processes: it would ask a server that is missing.

    Args:
        env: Environment of a worker.
    """
    size, local_size = (env.get(name) or "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if env.get(LAUNCHER) != "pmix" or size == "1" or launcher_of(env, int(local_size)) == "pmix":
        return []
    return [
        Problem(
            f"`{LAUNCHER}=pmix`: no PMIx server started this process",
            why="oneCCL would ask that server for the process's rank on its host; a module of the "
            "machine may have set the variable",
            hint=f"{unset_command(env)}, or start the processes by `mpiexec --pmi=pmix`",
        )
    ]


def _launcher(env: Mapping[str, str], rank_info: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of oneCCL for ranks, unless the user has set any."""
    local_world_size = int(rank_info.get("local_world_size", 1))
    without_mpi = {
        LAUNCHER: "none",
        TRANSPORT: "ofi",
        "CCL_LOCAL_RANK": str(rank_info.get("local_rank", 0)),
        "CCL_LOCAL_SIZE": str(local_world_size),
    }
    started_by = launcher_of(env, local_world_size)
    if env.get(LAUNCHER) == "none":
        return without_mpi  # the place, which that value asks for; the default transport is MPI
    if any(name in env for name in LAUNCH_GROUP) or started_by == "hydra":
        return {}  # the user's; or Intel MPI's, which is what oneCCL expects
    if started_by == "pmix" and _any(_PALS, env) and env.get("CCL_ROOT"):
        # mpiexec of PALS with PMIx, and the oneCCL of a module, which has that system's MPI: what
        # Argonne's module for Aurora sets, and oneCCL's default.  The oneCCL in torch's wheels
        # brings another MPI.  CCL_KVS_MODE=mpi would need a program that initialises MPI itself.
        return {LAUNCHER: "pmix", TRANSPORT: "mpi"}
    # Started by lmcore, torchrun or srun: oneCCL looks for MPI first, warns, and asks the others
    # for what it can be told.
    return without_mpi


def _any(names: Sequence[str], env: Mapping[str, str]) -> bool:
    return any(name in env for name in names)


def _all_linked(gpus: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all GPUs are of the series with links (Xe Link) between cards and tiles."""
    return all(str(gpu.get("generation", "")) == "Xe-HPC" for gpu in gpus)
