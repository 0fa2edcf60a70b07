"""Translation of the environment variables of other launchers to torchrun's.

`srun`, `mpiexec` and similar launchers set different variables.  `translate` returns torchrun's
variables for them, with an address for the rendezvous if the scheduler's variables give one.
Torch-free.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmcore.bounded_file import open_regular
from lmcore.errors import ConfigError, counted

__all__ = ["expand_nodelist", "tasks_on_node", "translate"]

_LOOPBACK = "127.0.0.1"
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the ports that systems assign
_MOST_NODES = 100_000
_MAX_NODEFILE_BYTES = 1 << 22
_SET_THEM = "set WORLD_SIZE, RANK, LOCAL_WORLD_SIZE and LOCAL_RANK yourself"


@dataclass(frozen=True)
class _Dialect:
    """Variables of one launcher; of several names for a number the first that is set counts."""

    rank: Sequence[str]
    world_size: Sequence[str]
    local_rank: Sequence[str]
    local_world_size: Sequence[str]
    job: Sequence[str]


_OPEN_MPI = _Dialect(
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "SLURM_JOB_ID"),
)
_PMI = _Dialect(
    ("PMI_RANK", "PALS_RANKID"),
    ("PMI_SIZE",),
    ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
    ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ("PALS_APID", "PBS_JOBID", "SLURM_JOB_ID"),
)


def translate(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would have set, if they are known and not set.

    Nothing is returned if torchrun's variables are set, or no launcher is recognised.  DeepSpeed's
    launcher sets all of them except one; PALS does not set the number of processes under PMIx, so
    that the user sets `WORLD_SIZE`.  A job script, which a scheduler runs once, is not a process
    of a run: only the variables that Slurm's `srun` sets are read.

    Args:
        env: Environment of the process.

    Raises:
        ConfigError: A variable of the launcher is malformed, or some variables are missing.
    """
    size = env.get("WORLD_SIZE", "").strip()
    if size:
        local_size = env.get("LOCAL_SIZE", "").strip()
        if local_size and not env.get("LOCAL_WORLD_SIZE", "").strip():
            return {"LOCAL_WORLD_SIZE": local_size}
        return {} if size == "1" or env.get("RANK", "").strip() else _ranks_among(size, env)
    for dialect in (_OPEN_MPI, _PMI):
        ranks = _ranks(dialect, env)
        if ranks:
            return ranks | _address(ranks, env, dialect.job)
    ranks = _slurm(env)
    if ranks:
        return ranks | _address(ranks, env, ("SLURM_JOB_ID",))
    for dialect in (_OPEN_MPI, _PMI):
        _refuse_half(dialect, env)
    return {}


def _refuse_half(dialect: _Dialect, env: Mapping[str, str]) -> None:
    """Refuse a process that is one of several without their number, or its rank on the host.

    It would train alone, as would all others, and write to the same directory.
    """
    size, rank = _first(dialect.world_size, env), _first(dialect.rank, env)
    local_size = _first(dialect.local_world_size, env)
    if (
        rank is not None
        and size is None
        and local_size is not None
        and (rank, local_size) != ("0", "1")
    ):
        raise ConfigError(
            f"a launcher started this process as rank {rank} of a run, without the number of ranks",
            why=f"{_unset(dialect.world_size)}, as under PMIx",
            hint="set WORLD_SIZE for all of them, such as `mpiexec --env WORLD_SIZE=24 -n 24 ...`",
        )
    if rank is None or size in {None, "1"}:
        return
    lacking = [
        name for name in (dialect.local_rank, dialect.local_world_size) if not _first(name, env)
    ]
    raise ConfigError(
        f"a launcher started this process as one of {size}, without its rank on the host",
        why="; ".join(map(_unset, lacking)),
        hint=_SET_THEM,
    )


def _unset(names: Sequence[str]) -> str:
    """Return in words that no variable of these names is set."""
    return (
        f"`{names[0]}` is not set" if len(names) == 1 else f"none of `{'`, `'.join(names)}` is set"
    )


def _ranks_among(size: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one of *size* processes, a number that the user set."""
    for dialect in (_OPEN_MPI, _PMI):
        stated = _first(dialect.world_size, env)
        ranks = _ranks(dialect, {**env, dialect.world_size[0]: stated or size})
        if not ranks:
            continue
        if ranks["WORLD_SIZE"] != size:
            started = counted(int(ranks["WORLD_SIZE"]), "process", "processes")
            raise ConfigError(
                f"`WORLD_SIZE={size}`: a launcher started {started}",
                why=f"`{dialect.world_size[0]}` says so",
                hint="leave `WORLD_SIZE` to the launcher",
            )
        return ranks | _address(ranks, env, dialect.job)
    return {}


def _ranks(dialect: _Dialect, env: Mapping[str, str]) -> dict[str, str]:
    found = {
        "RANK": _first(dialect.rank, env),
        "WORLD_SIZE": _first(dialect.world_size, env),
        "LOCAL_RANK": _first(dialect.local_rank, env),
        "LOCAL_WORLD_SIZE": _first(dialect.local_world_size, env),
    }
    return {name: value for name, value in found.items() if value} if all(found.values()) else {}


def _slurm(env: Mapping[str, str]) -> dict[str, str]:
    size, tasks = env.get("SLURM_STEP_NUM_TASKS", ""), env.get("SLURM_STEP_TASKS_PER_NODE", "")
    rank, local, node = (env.get(f"SLURM_{name}", "") for name in ("PROCID", "LOCALID", "NODEID"))
    if not (size and tasks and rank and local and node):
        return {}
    local_size = tasks_on_node(tasks, int(node)) if node.isdigit() else None
    if local_size is None:
        raise ConfigError(
            f"`SLURM_STEP_TASKS_PER_NODE={tasks}` does not say how many processes node {node} has",
            hint=_SET_THEM,
        )
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(local_size),
    }


def _address(
    ranks: Mapping[str, str], env: Mapping[str, str], job: Sequence[str]
) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, each if it is not set and known."""
    found: dict[str, str] = {}
    if not env.get("MASTER_ADDR"):
        host = _LOOPBACK if ranks["WORLD_SIZE"] == ranks["LOCAL_WORLD_SIZE"] else _first_host(env)
        found |= {"MASTER_ADDR": host} if host else {}
    name = _first(job, env)
    if not env.get("MASTER_PORT") and name:
        step = env.get("SLURM_STEP_ID", "")
        digest = hashlib.sha256(f"{name}.{step}".encode()).digest()
        port = _FIRST_PORT + int.from_bytes(digest[:4], "little") % _NUM_PORTS
        found["MASTER_PORT"] = str(port)
    return found


def _first_host(env: Mapping[str, str]) -> str | None:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        return next(expand_nodelist(nodes), None)
    file = env.get("PBS_NODEFILE")
    if file:
        try:
            with open(open_regular(file), encoding="utf-8") as stream:  # noqa: PTH123
                return stream.read(_MAX_NODEFILE_BYTES).split()[0]
        except (OSError, IndexError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"`PBS_NODEFILE={file}` names no host",
                why=str(error),
                hint="set MASTER_ADDR to the host of rank 0",
            ) from None
    return None


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


def expand_nodelist(text: str) -> Iterator[str]:
    """Yield the hosts of a node list of Slurm, such as "a[01-04,7],node-1,b[1-2]-ib", in order.

    Raises:
        ConfigError: The list is malformed, or has too many hosts.
    """
    for part in _split_outside_brackets(text):
        found = re.fullmatch(r"([^\[\],\s]*)\[([\d,\-]+)\]([^\[\],\s]*)", part, re.ASCII)
        if found is None:
            if not re.fullmatch(r"[^\[\],\s]+", part):
                raise _malformed(text)
            yield part
            continue
        before, ranges, after = found.groups()
        for numbers in ranges.split(","):
            bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", numbers, re.ASCII)
            if bounds is None:
                raise _malformed(text)
            first, last = bounds[1], bounds[2] or bounds[1]
            if not int(first) <= int(last) < int(first) + _MOST_NODES:
                raise _malformed(text)
            for number in range(int(first), int(last) + 1):
                yield f"{before}{number:0{len(first)}d}{after}"


def _split_outside_brackets(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text.strip())]


def _malformed(text: str) -> ConfigError:
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return ConfigError(
        f"`{shown}` is not a list of hosts",
        why="expected Slurm's form, such as `a[01-04,7],node-1`",
        hint="set MASTER_ADDR to the host of rank 0",
    )


def _first(names: Sequence[str], env: Mapping[str, str]) -> str | None:
    return next((env[name].strip() for name in names if env.get(name, "").strip()), None)
