"""Launchers of processes: the variables of each that give a process its rank.

One record for each launcher; torchrun's own variables are `rank_info`'s.  Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmcore.base.errors import ConfigError
from lmcore.runtime.launch.node_list import tasks_on_node

__all__ = [
    "LAUNCHERS",
    "NODE_FILE",
    "Launcher",
    "first_value",
    "is_number_above",
    "unknown_variables",
    "with_step_variables",
]

_SET_THEM = "set WORLD_SIZE, RANK, LOCAL_WORLD_SIZE and LOCAL_RANK yourself"
NODE_FILE = "PBS_NODEFILE"
"""Variable with the path of a file with a host on each line."""
_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST", NODE_FILE)


@dataclass(frozen=True)
class Launcher:
    """Variables of one launcher; of several names for a value the first that is set counts.

    Attributes:
        name: Name for messages.
        rank: Variables with the rank of the process.
        world_size: Variables with the number of processes.
        local_rank: Variables with the rank among the processes of the host.
        local_world_size: Variables with, or for, the number of processes of the host.
        job: Variables that tell runs apart, for a port that all processes derive alike.
        hosts: Variables whose list of hosts begins with the host of rank 0; empty: the launcher
            gives none, and MASTER_ADDR is needed for several hosts.
        count_local: Function that computes the number of processes of the host; None: the
            variable itself is the number.
        indices: Variables among *local_world_size* that count from 0.
    """

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]
    hosts: tuple[str, ...] = _HOST_LISTS
    count_local: Callable[[Mapping[str, str]], str | None] | None = None
    indices: tuple[str, ...] = ()

    def place(self, env: Mapping[str, str]) -> dict[str, str | None]:
        """Return torchrun's four variables; None for each that is unknown.

        Raises:
            ConfigError: The number of processes of the host cannot be computed.
        """
        found = {
            "RANK": first_value(self.rank, env),
            "WORLD_SIZE": first_value(self.world_size, env),
            "LOCAL_RANK": first_value(self.local_rank, env),
        }
        local = first_value(self.local_world_size, env)
        if self.count_local is not None:
            local = self.count_local(env) if all(found.values()) else None
        return {**found, "LOCAL_WORLD_SIZE": local}

    def variables(self) -> dict[str, tuple[str, ...]]:
        """Return the names for each of torchrun's four variables."""
        return {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
        }


def first_value(names: tuple[str, ...], env: Mapping[str, str]) -> str | None:
    """Return the first value of the variables that is not empty; None if there is none."""
    return next((env[name].strip() for name in names if env.get(name, "").strip()), None)


def _count_on_slurm_node(env: Mapping[str, str]) -> str | None:
    """Return the entry of this node in the list of task counts; None if a variable is missing."""
    tasks, node = env.get("SLURM_STEP_TASKS_PER_NODE", ""), env.get("SLURM_NODEID", "").strip()
    if not (tasks.strip() and node):
        return None
    count = tasks_on_node(tasks, int(node)) if node.isascii() and node.isdigit() else None
    if count is None:
        raise ConfigError(
            f"`SLURM_STEP_TASKS_PER_NODE={tasks}` does not say how many processes node {node} has",
            hint=_SET_THEM,
        )
    return str(count)


def _count_on_flux_node(env: Mapping[str, str]) -> str | None:
    """Return the number of tasks divided by the number of nodes, which Flux does not list."""
    size, nodes = (env.get(name, "").strip() for name in ("FLUX_JOB_SIZE", "FLUX_JOB_NNODES"))
    if not nodes:
        return None
    numbers = size.isascii() and size.isdigit() and nodes.isascii() and nodes.isdigit()
    if not numbers or int(nodes) == 0 or int(size) % int(nodes):
        raise ConfigError(
            f"`FLUX_JOB_SIZE={size}` and `FLUX_JOB_NNODES={nodes}` do not say how many processes "
            "this node has",
            why="Flux gives no count for each node, and the processes are not divided evenly",
            hint="start as many on each node (`flux run --tasks-per-node`), or " + _SET_THEM,
        )
    return str(int(size) // int(nodes))


LAUNCHERS = (
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "SLURM_JOB_ID"),
    ),
    Launcher(
        "MVAPICH2",
        ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
        ("PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID"),
    ),
    Launcher(
        "LSF's jsrun",
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "LSB_JOBID"),
        hosts=(),  # LSF's lists begin with the host of the job script
    ),
    Launcher(
        "Flux",
        ("FLUX_TASK_RANK",),
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
        ("FLUX_JOB_NNODES",),
        ("FLUX_JOB_ID",),
        hosts=(),
        count_local=_count_on_flux_node,
    ),
    Launcher(
        "PALS",
        ("PMI_RANK", "PALS_RANKID"),
        ("PMI_SIZE",),
        ("PALS_LOCAL_RANKID",),
        ("PALS_LOCAL_SIZE",),
        ("PALS_APID", "PBS_JOBID", "SLURM_JOB_ID"),
    ),
    Launcher(
        "MPICH",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        ("PBS_JOBID", "SLURM_JOB_ID"),
    ),
    Launcher(
        "Slurm's srun",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
        ("SLURM_JOB_ID",),
        count_local=_count_on_slurm_node,
        indices=("SLURM_NODEID",),
    ),
    Launcher(
        "PMIx",
        ("PMIX_RANK",),
        (),
        (),
        (),
        ("PMIX_NAMESPACE",),
    ),
)
"""Known launchers; a launcher that may run inside of another one precedes it."""

_STEP_ONLY = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_SRUN_COMM_HOST", "SLURM_LAUNCH_NODE_IPADDR")
"""Variables that srun alone sets, equal for all tasks of a step; a job script has none of them."""
_FIRST_SPECIAL_STEP = 0xFFFF_FF00
"""Step ids above this one mean a job script or an interactive shell."""
_OF_JOB_SCRIPT = {
    "SLURM_STEP_NUM_TASKS": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "SLURM_STEP_TASKS_PER_NODE": ("SLURM_TASKS_PER_NODE",),
}
"""Names that srun and the job script share, by the name of the step's own variable."""


def with_step_variables(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with the variables of a Slurm step that an older srun named otherwise.

    The same names describe the whole job in a job script, which runs once: it is none of the
    job's tasks.
    """
    step = first_value(_STEP_ONLY, env)
    is_script = step is None or is_number_above(_FIRST_SPECIAL_STEP, step)
    if is_script and "," not in env.get("SLURM_GTIDS", ""):  # one task of several on this host
        return env
    found = {name: first_value((name, *older), env) or "" for name, older in _OF_JOB_SCRIPT.items()}
    return {**env, **found}


_UNKNOWN_RANK = re.compile(
    r"(?:\w+_)?(?:RANK(?:_?ID)?|PROC_?ID)|ALPS_APP_PE|MP_CHILD|PMI_ID", re.ASCII
)
_UNKNOWN_SIZE = re.compile(
    r"\w+_(?:WORLD_SIZE|NUM_RANKS|N_?RANKS)|(?:HOROVOD|MPI|PMI2?|PMIX|HYDRA)_SIZE|MPIRUN_NPROCS",
    re.ASCII,
)


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Return the variables that look like a rank above 0 or a number of processes above 1.

    Launchers without a record name them alike, such as HOROVOD_RANK and MPIRUN_RANK.
    """
    return sorted(
        name
        for name, value in env.items()
        for pattern, smallest in ((_UNKNOWN_RANK, 0), (_UNKNOWN_SIZE, 1))
        if pattern.fullmatch(name) and is_number_above(smallest, value)
    )


def is_number_above(smallest: int, value: str) -> bool:
    """Return True if the value is a whole number above *smallest*."""
    digits = value.strip()
    return digits.isascii() and digits.isdigit() and len(digits) < 12 and int(digits) > smallest
