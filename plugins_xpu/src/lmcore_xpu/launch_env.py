"""Environment variables of a worker, set before torch is imported; torch-free.

The core keeps every variable that the user has set.  A group of variables that belong together is
the user's as soon as one of them is set: half of ours beside half of theirs is what hangs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcore.accelerator import Probe
from lmcore_xpu.detection.selector import SELECTOR
from lmcore_xpu.detection.visible import MASK

__all__ = ["LAUNCH_GROUP", "launch_env"]

LAUNCH_GROUP = (
    "CCL_PROCESS_LAUNCHER",
    "CCL_ATL_TRANSPORT",
    "CCL_LOCAL_RANK",
    "CCL_LOCAL_SIZE",
    "CCL_KVS_MODE",
    "CCL_KVS_USE_MPI_RANKS",
)
"""Variables by which oneCCL's processes find their ranks and each other."""

_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PMIX = ("PMIX_NAMESPACE", "PMIX_RANK")
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
    if not {MASK, SELECTOR} & env.keys():
        # The numbers are the bus's, and those that the probe shows.  Beside a mask it would change
        # what the mask's numbers mean.
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


def _launcher(env: Mapping[str, str], rank_info: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of oneCCL for ranks, unless the user has set any."""
    place = {
        "CCL_LOCAL_RANK": str(rank_info.get("local_rank", 0)),
        "CCL_LOCAL_SIZE": str(rank_info.get("local_world_size", 1)),
    }
    if env.get("CCL_PROCESS_LAUNCHER") == "none":
        return place  # which that value asks for
    if any(name in env for name in LAUNCH_GROUP) or _any(_HYDRA, env):
        return {}  # the user's; or Intel MPI's, which is what oneCCL expects
    if _any(_PALS, env) and _any(_PMIX, env) and env.get("CCL_ROOT"):
        # mpiexec of PALS with PMIx, and the oneCCL of a module, which has that system's MPI: what
        # Argonne's guide has for Aurora.  The oneCCL in torch's wheels brings another MPI.
        return {
            "CCL_PROCESS_LAUNCHER": "pmix",
            "CCL_ATL_TRANSPORT": "mpi",
            "CCL_KVS_MODE": "mpi",
            "CCL_KVS_USE_MPI_RANKS": "1",
        }
    # Started by lmcore, torchrun or srun: oneCCL looks for MPI first, warns, and asks the others
    # for what it can be told.
    return {"CCL_PROCESS_LAUNCHER": "none", "CCL_ATL_TRANSPORT": "ofi", **place}


def _any(names: Sequence[str], env: Mapping[str, str]) -> bool:
    return any(name in env for name in names)


def _all_linked(gpus: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all GPUs are of the series with links (Xe Link) between cards and tiles."""
    return all(str(gpu.get("generation", "")) == "Xe-HPC" for gpu in gpus)
