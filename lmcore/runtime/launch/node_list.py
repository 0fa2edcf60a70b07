"""Slurm's short forms: lists of hosts, such as "a[01-04,7],node-1", and counts for each node."""

from __future__ import annotations

import re

from lmcore.base.errors import ConfigError

__all__ = ["first_host", "tasks_on_node"]

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
