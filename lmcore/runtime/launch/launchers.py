"""Launchers: the variables by which each numbers the processes that it starts.

`LAUNCHERS` has a record for each. `lmcore.runtime.launch.scheduler_env` and `node_place` read the
variables; a job of `lmcore launch` starts its processes with the words of `start`. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmcore.base.errors import ConfigError

__all__ = [
    "LAUNCHERS",
    "NODE_FILE",
    "Launcher",
    "NodeVariables",
    "first_value",
    "tasks_on_node",
]

_SET_THEM = "set WORLD_SIZE, RANK, LOCAL_WORLD_SIZE and LOCAL_RANK yourself"
NODE_FILE = "PBS_NODEFILE"
"""Variable with the path of a file with a host on each line."""
_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST", NODE_FILE)


Start = Callable[[int, int, Sequence[str]], list[str]]
"""Returns the words that precede a command: of nodes, processes of a node, exported variables."""


@dataclass(frozen=True)
class NodeVariables:
    """Variables of a launcher that starts one process for each node, which starts the others.

    Attributes:
        nodes: Variables with the number of nodes.
        node_rank: Variables with the rank of the node, from 0.
        per_node: Variables with the number of processes of a node; a word such as `auto`: one for
            each device.
        address: Variables with the host of rank 0.
        port: Variables with the port there.
    """

    nodes: tuple[str, ...]
    node_rank: tuple[str, ...]
    per_node: tuple[str, ...]
    address: tuple[str, ...]
    port: tuple[str, ...]


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
        word: Name in a profile of `lmcore launch`; empty: jobs do not use it.
        start: Function that returns the words which start a command as each process of a job; None:
            jobs do not use it, or start one process for each node.
        node: Variables, if it starts one process for each node.
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
    word: str = ""
    start: Start | None = None
    node: NodeVariables | None = None

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


def _srun(nodes: int, per_node: int, _exported: Sequence[str]) -> list[str]:
    counts = [f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
    return ["srun", *counts, "--kill-on-bad-exit=1"]


def _pals(nodes: int, per_node: int, _exported: Sequence[str]) -> list[str]:
    """Return PALS's `mpiexec`, which under PMIx does not set the number of processes."""
    size = str(nodes * per_node)
    given = ["--envall", "--env", f"WORLD_SIZE={size}"]
    return ["mpiexec", *given, "-n", size, "-ppn", str(per_node)]


def _hydra(nodes: int, per_node: int, _exported: Sequence[str]) -> list[str]:
    return ["mpiexec", "-genvall", "-n", str(nodes * per_node), "-ppn", str(per_node)]


def _open_mpi(nodes: int, per_node: int, exported: Sequence[str]) -> list[str]:
    """Return Open MPI's `mpiexec`, which passes on the variables that are named."""
    named = [word for name in exported for word in ("-x", name)]
    size = str(nodes * per_node)
    return ["mpiexec", "-n", size, "--map-by", f"ppr:{per_node}:node", *named]


LAUNCHERS = (
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "SLURM_JOB_ID"),
        word="openmpi",
        start=_open_mpi,
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
        word="pals",
        start=_pals,
    ),
    Launcher(
        "MPICH",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        ("PBS_JOBID", "SLURM_JOB_ID"),
        word="mpich",
        start=_hydra,
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
        word="srun",
        start=_srun,
    ),
    Launcher(
        "PMIx",
        ("PMIX_RANK",),
        (),
        (),
        (),
        ("PMIX_NAMESPACE",),
    ),
    Launcher(
        "Kubeflow",
        (),
        (),
        (),
        (),
        (),
        hosts=(),
        word="node",
        node=NodeVariables(
            ("PET_NNODES",),
            ("PET_NODE_RANK", "RANK"),
            ("PET_NPROC_PER_NODE",),
            ("MASTER_ADDR", "PET_MASTER_ADDR"),
            ("MASTER_PORT", "PET_MASTER_PORT"),
        ),
    ),
)
"""Known launchers; a launcher that may run inside of another one precedes it."""


def tasks_on_node(text: str, node: int) -> int | None:
    """Return the number of processes on node *node* from Slurm's "4(x2),3"; None if unknown."""
    counts: list[tuple[int, int]] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if found is None:
            return None
        counts.append((int(found[1]), int(found[2] or 1)))
    for tasks, repeated in counts:
        if node < repeated:
            return tasks
        node -= repeated
    return None
