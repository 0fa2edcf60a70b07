"""Communication backends of Intel GPUs: torch's `xccl`, and `ccl` of older clusters.

Both reach Intel's oneCCL.  `xccl` comes with torch; `ccl` came with the package
`oneccl_bindings_for_pytorch`, which ended with its release for torch 2.8, and is used only if
requested by name, or if torch was built without `xccl`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lmcore.contract import CommBackend
from lmcore.contract.op.packages import Package
from lmcore_xpu.packages import BINDINGS, BINDINGS_LIBRARY, PACKAGES, installed_packages

__all__ = [
    "backends",
    "ccl",
    "environment_problem",
    "variables_problem",
    "why_no_ccl",
    "why_no_xccl",
    "xccl",
]

_ROOT = "CCL_ROOT"
_KERNELS = "CCL_KERNEL_PATH"
_LIBRARY = "lib/libccl.so.1"
_TRANSPORT = "CCL_ATL_TRANSPORT"
_LAUNCHER = "CCL_PROCESS_LAUNCHER"
_MPI_RANKS = (
    *("MPI_LOCALRANKID", "PMI_RANK", "PMIX_RANK", "PALS_RANKID"),
    *("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"),
)
"""Variables of the rank; each launcher that can start MPI processes sets at least one."""
_LOCAL_RANKS = {
    "none": ("CCL_LOCAL_RANK", "CCL_LOCAL_SIZE"),
    "hydra": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Variables of the local rank and size that oneCCL reads, by its process launcher."""
_INSTEAD = "use `xccl`, which comes with torch for Intel GPUs"


def xccl() -> CommBackend:
    """Return torch's XCCL backend.

    It averages over some of oneCCL's paths only, so the core sums and divides.  It needs the
    device: sharded training has hung with a process group without it.
    """
    version = _library_version() if why_no_xccl() is None else None
    return CommBackend(
        name="xccl",
        device_type="xpu",
        available=lambda: why_no_xccl() or variables_problem(os.environ),
        supports_average=False,
        needs_device_id=True,
        facts={} if version is None else {"oneccl": version},
    )


def why_no_xccl() -> str | None:
    """Return None, or why this torch has no XCCL."""
    from torch import distributed

    if not distributed.is_available():
        return "torch was built without torch.distributed"
    if not distributed.is_xccl_available():
        return "torch was built without XCCL"
    return None


def ccl() -> CommBackend:
    """Return the backend of oneCCL's bindings; they are imported when they are requested."""
    package = installed_packages().get(BINDINGS)
    return CommBackend(
        name="ccl",
        device_type="xpu",
        priority=-10,
        available=lambda: why_no_ccl(package, os.environ),
        register=_register,
        supports_average=False,
        needs_device_id=True,
        facts={"bindings": package.version} if package is not None else {},
    )


def why_no_ccl(package: Package | None, env: Mapping[str, str]) -> str | None:
    """Return None, or why the bindings cannot be used, cheap reasons first.

    They are imported last, for which torch must be loaded: in a worker, not in the launcher.

    Args:
        package: Installed package of the bindings.
        env: Environment of this process.
    """
    if package is None:
        return (
            f"`{BINDINGS}` is not installed; its last release, 2.8, is for torch 2.8, and there is "
            f"none for {_torch()}: {_INSTEAD}"
        )
    problem = package.problem or _root_problem(env)
    if problem is None and (contradiction := variables_problem(env)) is not None:
        return contradiction  # that `xccl` would meet, too
    problem = problem or PACKAGES[BINDINGS].import_problem() or _library_problem()
    return None if problem is None else f"{problem}; {_INSTEAD}"


def environment_problem(env: Mapping[str, str]) -> str | None:
    """Return why oneCCL, as loaded by the bindings, would not find its parts, or not start."""
    return _root_problem(env) or variables_problem(env)


def variables_problem(env: Mapping[str, str]) -> str | None:
    """Return which variable of oneCCL contradicts the way in which this process was started.

    Without an MPI launcher every process is rank 0 of a separate MPI, which then ends it: seen with
    oneCCL 2021.15.2 on a CPU.
    """
    if env.get(_TRANSPORT) == "mpi" and not any(name in env for name in _MPI_RANKS):
        return (
            f"`{_TRANSPORT}=mpi`, and no MPI launcher started this process: start it with "
            f"`mpiexec`, or set `{_TRANSPORT}=ofi`"
        )
    names = _LOCAL_RANKS.get(env.get(_LAUNCHER) or "hydra", ())
    for name, own in zip(names, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), strict=False):
        if name in env and own in env and env[name] != env[own]:
            return (
                f"`{name}={env[name]}` is not of this process, which has `{own}={env[own]}`: unset "
                "it, or start each process with the launcher that sets it"
            )
    return None


def _root_problem(env: Mapping[str, str]) -> str | None:
    """Return why oneCCL's libraries and kernels would not be found."""
    if env.get(_KERNELS):
        return None
    root = env.get(_ROOT, "")
    if not root and not _is_installed_with_python():
        return (
            f"oneCCL's environment is not set: `{_ROOT}` is empty; `source env/vars.sh` in the "
            f"folder of oneCCL, or `env/setvars.sh` in that of `{BINDINGS}`, before the start"
        )
    if root and not (Path(root) / _LIBRARY).exists():
        return f"oneCCL's environment is half set: `{_ROOT}={root}` has no `{_LIBRARY}`"
    return None


def _is_installed_with_python() -> bool:
    """Return True if oneCCL is in the bindings' folder or in Python's (`pip install oneccl`).

    The bindings find both through their run path, and oneCCL its kernels beside its library.
    """
    spec = importlib.util.find_spec(BINDINGS)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any((Path(folder) / _LIBRARY).exists() for folder in (*folders, sys.prefix))


def _library_problem() -> str | None:
    """Return why the part for GPUs cannot be loaded; the package itself only warns of it."""
    (folder,) = importlib.import_module(BINDINGS).__path__
    try:
        ctypes.CDLL(str(Path(folder) / BINDINGS_LIBRARY))
    except OSError as error:
        return f"`{BINDINGS}` is installed, and its part for GPUs cannot be loaded: {error}"
    return None


def _register() -> None:
    """Register `ccl` with torch by importing the package."""
    from torch import distributed

    importlib.import_module(BINDINGS)
    if not hasattr(distributed.Backend, "CCL"):
        raise RuntimeError(f"`{BINDINGS}` was imported, and torch knows no backend `ccl`")
    devices = distributed.Backend.backend_capability.get("ccl", [])
    if "xpu" not in devices:
        raise RuntimeError(f"`{BINDINGS}` registered `ccl` for {', '.join(devices)}, not for xpu")


def _library_version() -> str | None:
    """Return the version of oneCCL among torch's packages, if it is recorded."""
    try:
        return importlib.metadata.version("oneccl")
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}"


def backends() -> list[CommBackend]:
    """Return the communication backends, the default first."""
    return [xccl(), ccl()]
