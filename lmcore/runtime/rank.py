"""Who this process is among the processes of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lmcore.errors import ConfigError

__all__ = ["RankInfo", "rank_info"]


@dataclass(frozen=True)
class RankInfo:
    """This process's place: global, on its host, and how many there are of each."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    def to_dict(self) -> dict[str, int]:
        """Return the four numbers by name."""
        return asdict(self)


def rank_info(env: Mapping[str, str]) -> RankInfo:
    """Read the process's place from the variables that a launcher sets.

    Raises:
        ConfigError: A launcher started several processes, which this version cannot use.
    """
    world = env.get("WORLD_SIZE", "1")
    if world.strip() not in {"", "1"}:
        raise ConfigError(
            f"this process is one of {world}, and this version trains on one",
            why="the environment has WORLD_SIZE, as a launcher such as torchrun sets it",
            hint="start `lmcore train` by itself, or unset WORLD_SIZE",
        )
    return RankInfo()
