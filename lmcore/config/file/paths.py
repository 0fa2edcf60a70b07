"""Paths in settings: relative to the file that holds them, and absolute in a run's own file.

The declaration of an option says by `paths` that its value holds paths, and in which form.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcore.config.derived.data_source import is_number
from lmcore.config.option import INPUT_PATH, OUTPUT_PATH, RANGES, Option

__all__ = ["absolute_paths", "map_paths", "path_exists"]


def map_paths(option: Option, value: Any, function: Callable[[str], str]) -> Any:
    """Return the value of an option with *function* applied to each path in it.

    Weights beside the prefixes of a list stay as they are, as does text of a wrong form.
    """
    if option.paths is None or value is None:
        return value
    if option.paths in {INPUT_PATH, OUTPUT_PATH}:
        return function(value)
    if option.paths != RANGES:
        return tuple(word if is_number(word) else function(word.strip()) for word in value)
    groups = value if any(" " in word.strip() for word in value) else [" ".join(value)]
    return tuple(_map_ranges(group, function) for group in groups if group)


def _map_ranges(group: str, function: Callable[[str], str]) -> str:
    """Return "NAME: WEIGHT START:END PATH, ..." with *function* applied to each path."""
    title, _, rest = group.partition(":")
    entries = [entry.split() for entry in rest.split(",") if entry.strip()]
    if any(len(entry) != 3 for entry in entries):
        return group
    mapped = (f"{weight} {span} {function(path)}" for weight, span, path in entries)
    return f"{title}: {', '.join(mapped)}"


def absolute_paths(option: Option, value: Any) -> Any:
    """Return the value of an option with every path made absolute."""
    return map_paths(option, value, os.path.abspath)


def path_exists(path: str) -> bool:
    """Return True if there is a file or directory *path*, or a dataset with this prefix."""
    return any(Path(path + ending).exists() for ending in ("", ".idx", ".bin"))
