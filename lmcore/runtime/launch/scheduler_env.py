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
from collections.abc import Iterator, Mapping

from lmcore.base.bounded_file import open_regular
from lmcore.base.errors import ConfigError, unreadable
from lmcore.runtime.launch.launchers import LAUNCHERS, NODE_FILE, Launcher, first_value

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
            hosts = stream.read(_MAX_NODEFILE_BYTES).split()
        if hosts:
            return hosts[0]
        why = "the file is empty"
    except (OSError, UnicodeDecodeError) as error:
        why = unreadable(error)
    raise ConfigError(
        f"`{variable}={file}` names no host", why=why, hint="set MASTER_ADDR to the host of rank 0"
    )


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
