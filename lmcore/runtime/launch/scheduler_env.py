"""Translation of the environment variables of other launchers to torchrun's.

`srun`, `mpiexec` and similar launchers set different variables (`LAUNCHERS`, a record for each).
`translate` returns torchrun's variables for them, with an address for the rendezvous if the
launcher's variables give one.  One of several processes that cannot tell which it is is refused:
it would train alone, as would all others.  Slurm's short forms are lists of hosts, such as
"a[01-04,7],node-1", and counts for each node.  Torch-free.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lmcore.base.bounded_file import open_regular
from lmcore.base.errors import ConfigError

__all__ = ["translate"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the ports that systems assign
_MAX_NODEFILE_BYTES = 1 << 22
_WORDS = {
    "RANK": "rank",
    "WORLD_SIZE": "size",
    "LOCAL_RANK": "local rank",
    "LOCAL_WORLD_SIZE": "local size",
}


def translate(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would have set, if they are known and not set.

    Nothing is returned if torchrun's variables are set, or no launcher is recognised.  A
    launcher of another engine sets all of them except one; PALS does not set the number of
    processes under PMIx, so that the user sets `WORLD_SIZE`.  A job script, which a scheduler runs
    once, is not a process of a run.

    Args:
        env: Environment of the process.

    Raises:
        ConfigError: A launcher started several processes, and a variable is missing or malformed.
    """
    size = env.get("WORLD_SIZE", "").strip()
    if size:
        local_size = env.get("LOCAL_SIZE", "").strip()
        if local_size and not env.get("LOCAL_WORLD_SIZE", "").strip():
            return {"LOCAL_WORLD_SIZE": local_size}
        return {} if size == "1" or env.get("RANK", "").strip() else _ranks_among(size, env)
    env = with_step_variables(env)
    alone: dict[str, str] = {}
    for launcher in LAUNCHERS:
        ranks = _complete(launcher.place(env))
        if ranks:
            ranks |= _address(ranks, env, launcher)
            if ranks["WORLD_SIZE"] != "1":
                return ranks
        alone = alone or ranks
    _refuse_incomplete(env)
    _refuse_unknown(env)
    if alone:
        return alone
    if is_number_above(1, env.get("SLURM_NTASKS", "")) and env.get("SLURM_PROCID"):
        logger.info(
            "one process, as in a job script: start it with `srun` for the %s tasks of the job",
            env["SLURM_NTASKS"],
        )
    return {}


def _refuse_incomplete(env: Mapping[str, str]) -> None:
    """Refuse one of several processes of a known launcher if a variable is missing."""
    signs = {launcher: found for launcher in LAUNCHERS if (found := _signs(launcher, env))}
    if not signs:
        return
    places = {launcher: launcher.place(env) for launcher in signs}
    # Of two with as much, the later one: the earlier names add to the later ones.
    launcher = max(reversed(places), key=lambda one: sum(map(bool, places[one].values())))
    rank, size = places[launcher]["RANK"], places[launcher]["WORLD_SIZE"]
    place = "one of several" if rank is None else f"rank {rank}"
    if size is not None and is_number_above(1, size):
        place = f"one of {size}"
    missing = [name for name, value in places[launcher].items() if value is None]
    every_sign = dict.fromkeys(name for names in signs.values() for name in names)
    raise ConfigError(
        f"{launcher.name} started this process as {place}; missing: "
        f"{', '.join(_WORDS[name] for name in missing)}",
        why="; ".join([_shown(signs[launcher][0], env), *_unset(launcher, missing, env)]),
        hint=_hint([*every_sign], only_size=missing == ["WORLD_SIZE"]),
    )


def _signs(launcher: Launcher, env: Mapping[str, str]) -> list[str]:
    """Return the variables of a launcher that tell of several processes."""
    return [
        name
        for key, names in launcher.variables().items()
        for name in names
        if is_number_above(
            1 if key.endswith("SIZE") and name not in launcher.indices else 0, env.get(name, "")
        )
    ]


def _unset(launcher: Launcher, missing: list[str], env: Mapping[str, str]) -> Iterator[str]:
    """Yield in words which variables are not set."""
    for key in missing:
        names = launcher.variables()[key]
        if key == "LOCAL_WORLD_SIZE" and launcher.count_local is not None:  # it needs all of them
            yield from (f"`{name}` is not set" for name in names if not env.get(name, "").strip())
        elif not names:
            yield f"{launcher.name} has no variable with the {_WORDS[key]}"
        elif len(names) == 1:
            yield f"`{names[0]}` is not set"
        else:
            yield f"none of `{'`, `'.join(names)}` is set"


def _refuse_unknown(env: Mapping[str, str]) -> None:
    """Refuse one of several processes of a launcher that is not known."""
    names = unknown_variables(env)
    if names:
        raise ConfigError(
            f"an unknown launcher started this process as one of several: {_shown(names[0], env)}",
            why="each of them would run alone",
            hint=_hint(names),
        )


def _shown(name: str, env: Mapping[str, str]) -> str:
    return f"`{name}={env[name].strip()}`"


def _hint(signs: list[str], *, only_size: bool = False) -> str:
    start = (
        "set WORLD_SIZE for all of them, such as `mpiexec --env WORLD_SIZE=24 -n 24 ...`"
        if only_size
        else "start the processes with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, "
        "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each of them"
    )
    return f"{start}; if this process runs alone, unset {', '.join(signs)}"


def _ranks_among(size: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one of *size* processes, a number that the user set."""
    for launcher in LAUNCHERS:
        if not launcher.world_size:
            continue
        stated = first_value(launcher.world_size, env)
        ranks = _complete(launcher.place({**env, launcher.world_size[0]: stated or size}))
        if not ranks:
            continue
        if ranks["WORLD_SIZE"] != size:
            name = next(one for one in launcher.world_size if env.get(one, "").strip())
            raise ConfigError(
                f"`WORLD_SIZE={size}` contradicts {_shown(name, env)}",
                why=f"{launcher.name} says how many processes it started",
                hint="leave `WORLD_SIZE` to the launcher",
            )
        return ranks | _address(ranks, env, launcher)
    return {}


def _complete(place: Mapping[str, str | None]) -> dict[str, str]:
    """Return the four variables; nothing if one is unknown."""
    known = {name: value for name, value in place.items() if value is not None}
    return known if len(known) == len(place) else {}


def _address(
    ranks: Mapping[str, str], env: Mapping[str, str], launcher: Launcher
) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, each if it is not set and known."""
    found: dict[str, str] = {}
    if not env.get("MASTER_ADDR"):
        alone = ranks["WORLD_SIZE"] == ranks["LOCAL_WORLD_SIZE"]
        host = _LOOPBACK if alone else _first_host(launcher, env)
        found |= {"MASTER_ADDR": host} if host else {}
    name = first_value(launcher.job, env)
    if not env.get("MASTER_PORT") and name:
        step = env.get("SLURM_STEP_ID", "")
        digest = hashlib.sha256(f"{name}.{step}".encode()).digest()
        port = _FIRST_PORT + int.from_bytes(digest[:4], "little") % _NUM_PORTS
        found["MASTER_PORT"] = str(port)
    return found


def _first_host(launcher: Launcher, env: Mapping[str, str]) -> str | None:
    variable = next((name for name in launcher.hosts if env.get(name, "").strip()), None)
    if variable is None:
        return None
    if variable != NODE_FILE:
        return first_host(env[variable])
    file = env[variable]
    try:
        with open(open_regular(file), encoding="utf-8") as stream:  # noqa: PTH123
            return stream.read(_MAX_NODEFILE_BYTES).split()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"`{variable}={file}` names no host",
            why=str(error),
            hint="set MASTER_ADDR to the host of rank 0",
        ) from None


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


_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOSTS = rf"(?:[^\[\],\s]|{_RANGES})+"
"""Hosts with a common pattern: any number of ranges, between characters of the name."""
_LIST = re.compile(rf"({_HOSTS})\s*(?:,\s*{_HOSTS}\s*)*", re.ASCII)
"""Matched from left to right without looking ahead, in linear time."""
_RANGE = re.compile(r"\[(\d+)[^\]]*\]", re.ASCII)


def first_host(text: str) -> str:
    """Return the first host of a node list, such as gpu-1-03 of "gpu-[1-2]-[03-04,7],node-1".

    Raises:
        ConfigError: The list is malformed.
    """
    found = _LIST.fullmatch(text.strip())
    if found is None:
        shown = text if len(text) <= 80 else f"{text[:80]}..."
        raise ConfigError(
            f"`{shown}` is not a list of hosts",
            why="expected Slurm's form, such as `a[01-04,7],node-1`",
            hint="set MASTER_ADDR to the host of rank 0",
        )
    return _RANGE.sub(r"\1", found[1])  # with its leading zeros


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
