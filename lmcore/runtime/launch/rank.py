"""Rank of this process among the processes of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lmcore.base.errors import ConfigError

__all__ = [
    "AGENT_STORE",
    "RankInfo",
    "named_ranks",
    "only_process",
    "rank_info",
    "started_by_launcher",
]

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that is `True` if torchrun has the store of the processes."""


@dataclass(frozen=True)
class RankInfo:
    """Global and local rank of this process, and the numbers of processes."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    def to_dict(self) -> dict[str, int]:
        """Return the four numbers by name."""
        return asdict(self)

    def to_env(self) -> dict[str, str]:
        """Return the environment variables for `rank_info`."""
        return {name.upper(): str(value) for name, value in asdict(self).items()}


def rank_info(env: Mapping[str, str]) -> RankInfo:
    """Return the rank from the variables that a launcher such as torchrun sets.

    These are RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; without them the process is the
    only one.

    Raises:
        ConfigError: A variable is missing, is not a number, or contradicts another one.
    """
    given = {name: _number(env, name) for name in RankInfo().to_env()}
    world_size = given["WORLD_SIZE"] if given["WORLD_SIZE"] is not None else 1
    alone = RankInfo().to_env()
    missing = [name for name, value in given.items() if value is None]
    if world_size > 1 and missing:
        raise ConfigError(
            f"this process is one of {world_size} and does not know which: `{'`, `'.join(missing)}`"
            f" {'is' if len(missing) == 1 else 'are'} not set",
            why=_shown(env),
            hint="start the processes with a launcher that sets all four, such as torchrun",
        )
    values = {name: int(alone[name]) if value is None else value for name, value in given.items()}
    rank = RankInfo(**{name.lower(): value for name, value in values.items()})
    wrong = _contradiction(rank)
    if wrong:
        raise ConfigError(
            f"the launcher's variables contradict each other: {wrong}",
            why=_shown(env),
            hint="unset them to run one process, or let a launcher such as torchrun set all four",
        )
    return rank


def started_by_launcher(env: Mapping[str, str]) -> bool:
    """Return True if a launcher started this process, even as the only one."""
    return bool(env.get("WORLD_SIZE", "").strip())


def only_process(env: Mapping[str, str]) -> RankInfo:
    """Return the rank of a process that must be the only one.

    Raises:
        ConfigError: A launcher started several processes, or see `rank_info`.
    """
    world = env.get("WORLD_SIZE", "").strip()
    if world not in {"", "1"}:
        raise ConfigError(
            f"this process is one of {world}, and this command runs in one",
            why="a launcher such as torchrun or srun has set its variables",
            hint="start it alone, or unset WORLD_SIZE and the other variables of the launcher",
        )
    return rank_info(env)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5" for several."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"`{name}={text}` is not a number of processes or a rank",
            why="a launcher such as torchrun sets it to a whole number",
            hint=f"unset `{name}`, or start with a launcher",
        )
    return int(text)


def _contradiction(info: RankInfo) -> str:
    """Return the first contradiction between the numbers; empty if there is none."""
    for size, rank in (("world_size", "rank"), ("local_world_size", "local_rank")):
        many, index = getattr(info, size), getattr(info, rank)
        if many < 1:
            return f"{size.upper()} is {many}"
        if index >= many:
            return f"{rank.upper()} is {index} of {size.upper()} {many}; ranks begin with 0"
    if info.local_world_size > info.world_size:
        return f"LOCAL_WORLD_SIZE is {info.local_world_size} and WORLD_SIZE only {info.world_size}"
    if info.local_rank > info.rank:
        return f"LOCAL_RANK is {info.local_rank} and RANK only {info.rank}"
    return ""


def _shown(env: Mapping[str, str]) -> str:
    """Return the variables that are set, for a message."""
    return ", ".join(f"{name}={env[name]}" for name in RankInfo().to_env() if name in env)
