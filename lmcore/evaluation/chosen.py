"""Tasks that flags choose, with the files of each.  Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.evaluation.files import find_files
from lmcore.evaluation.score import check_metrics
from lmcore.evaluation.task import Task, named_tasks

if TYPE_CHECKING:
    from lmcore.evaluation.finetune.record import TunedTask

__all__ = ["chosen_tasks", "place_of", "places_of"]


def chosen_tasks(
    names: Sequence[str], data: Sequence[str], known: Sequence[Task], *, flag: str
) -> list[tuple[Task, list[Path]]]:
    """Return tasks with their files.

    Args:
        names: Names of tasks, or paths of Python files with tasks of the user; one may have several
            with commas between.
        data: Directory with the files of tasks, and `NAME=FILE` for the file of one task.
        known: Tasks to choose from.
        flag: Flag of the names, "--task"; the flag of the data has "-data" after it.

    Raises:
        ConfigError: There is no such task, it is named twice, has an unknown metric, or no place of
            its data; or a place is for no task.
        DataError: The files of a task are missing.
    """
    tasks = named_tasks(names, known)
    for task in tasks:
        check_metrics(task)
    places = places_of(data, [task.name for task in tasks], flag)
    return [(task, find_files(task, place_of(task, places, flag))) for task in tasks]


def places_of(given: Sequence[str], names: Sequence[str], flag: str = "--task") -> dict[str, Path]:
    """Return the place of the data by task; the place for all others has an empty name.

    Args:
        given: Directory with the files of tasks, and `NAME=FILE` for the file of one task.
        names: Names of the tasks that are asked for.
        flag: Flag of the names.

    Raises:
        ConfigError: A task has two places, or one is for a task that is not asked for.
    """
    found: dict[str, Path] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not equals or name not in names:
            name, path = "", one
            if equals and not Path(one).exists():
                raise ConfigError(
                    f"`{flag}-data {one}` is for no task of `{flag}`",
                    hint=f"use one of {', '.join(names)}, or the path of a directory",
                )
        if name in found:
            raise ConfigError(
                f"`{flag}-data` gives two places{f' of {name}' if name else ''}",
                why=f"`{found[name]}` and `{path}`",
                hint="give one directory, and `NAME=FILE` for tasks whose files are elsewhere",
            )
        found[name] = Path(path)
    return found


def place_of(task: Task | TunedTask, places: Mapping[str, Path], flag: str = "--task") -> Path:
    """Return the place of a task's data.

    Args:
        task: The task.
        places: Result of `places_of`.
        flag: Flag of the names.

    Raises:
        ConfigError: There is none.
    """
    place = places.get(task.name, places.get(""))
    if place is None:
        raise ConfigError(
            f"the task `{task.name}` needs `{flag}-data DIR`",
            why=f"its files are from {task.release}",
        )
    return place
