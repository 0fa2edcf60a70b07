"""Tasks that flags choose, with the files of each.  Torch-free."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, suggestion
from lmcore.base.missing_path import missing_path_hint
from lmcore.evaluation.files import find_files, iter_examples
from lmcore.evaluation.score import check_kind, check_metrics
from lmcore.evaluation.task import Streamed, Task

if TYPE_CHECKING:
    from lmcore.evaluation.finetune.record import TunedTask

__all__ = ["NQ", "chosen_tasks", "place_of", "places_of", "require_examples"]

NQ = "nq"
"""Name of the task that scores an index by questions."""


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
    return [(task, find_files(task, place_of(task, places, flag), flag)) for task in tasks]


def require_examples(wanted: Sequence[tuple[Task, Sequence[Path]]], limit: int | None) -> None:
    """Read the examples of tasks, of texts the first one, before a model is loaded.

    Args:
        wanted: Tasks with their files.
        limit: Number of examples that are taken from the beginning of each; None: all.

    Raises:
        ConfigError: A metric of a task is for other examples.
        DataError: A file cannot be read, has another layout, or no examples.
    """
    for task, files in wanted:
        for example in itertools.islice(iter_examples(task, files), limit):
            check_kind(task, type(example))
            if isinstance(example, Streamed):
                break  # a file of texts may be larger than memory


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
                    why=f"there is no task `{one.partition('=')[0]}`, and no file `{one}`",
                    hint=suggestion(one.partition("=")[0], names),
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


def named_tasks(names: Sequence[str], known: Sequence[Task]) -> list[Task]:
    """Return the tasks with given names.

    Args:
        names: Names of tasks, or paths of Python or YAML files with tasks of the user; one may have
            several with commas between.
        known: Tasks to choose from.

    Raises:
        ConfigError: There is no such task, it is named twice, or a file has none.
    """
    by_name = {task.name: task for task in known}
    wanted: list[str] = []
    asked = [one.strip() for each in names for one in each.split(",") if one.strip()]
    for name in asked:
        path = Path(name)
        if path.suffix not in _FILES:
            wanted.append(name)
            continue
        for task in _FILES[path.suffix](path):
            if task.name in by_name:
                raise ConfigError(
                    f"the task `{task.name}` of `{name}` has the name of another task",
                    hint="give it another name",
                )
            by_name[task.name] = task
            wanted.append(task.name)
    for name in wanted:
        if name not in by_name and Path(name).exists():
            raise ConfigError(
                f"there is no task `{name}`, which is a path",
                hint="give checkpoints before `--task`, and tasks of your own as a Python or YAML "
                "file",
            )
        if name not in by_name:
            raise _unknown(name, by_name)
        if wanted.count(name) > 1:
            raise ConfigError(f"the task `{name}` is named twice", hint="name it once")
    return [by_name[name] for name in wanted]


def _unknown(name: str, known: Mapping[str, Task]) -> ConfigError:
    """Return the error of a name that is no task's, or is one's in another way."""
    from lmcore.evaluation.finetune import TUNED

    tuned = {task.name for task in TUNED}
    if name in tuned:
        return ConfigError(
            f"the task `{name}` needs a head that is trained for it",
            why="it does not ask for the probability of a text",
            hint=f"`lmcore evaluate CHECKPOINT --task {name} --finetune --task-data DIR --save DIR`"
            " trains one and scores it",
        )
    if name.lower() == NQ:
        return ConfigError(
            f"there is no task `{name}`" if name != NQ else f"the task `{NQ}` needs an index",
            hint=f"`lmcore evaluate ENCODER --task {NQ} --index DIR --task-data FILE` scores an "
            "index by questions",
        )
    return ConfigError(f"there is no task `{name}`", hint=suggestion(name, {*known, *tuned, NQ}))


def _tasks_of_file(path: Path) -> list[Task]:
    """Run a Python file of the user and return the tasks that it defines, in its order."""
    if not path.is_file():
        hint = missing_path_hint(path, "give the path of a Python file")
        raise ConfigError(f"there is no file `{path}`", hint=hint)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"`{path}` fails", why=f"{type(error).__name__}: {error}", hint="run it with Python"
        ) from error
    found = [one for one in vars(module).values() if isinstance(one, Task)]
    if not found:
        raise ConfigError(
            f"`{path}` defines no task",
            hint="write `MINE = Task(...)`, with `from lmcore.evaluation.task import Task`",
        )
    return found


def _task_of_yaml(path: Path) -> list[Task]:
    from lmcore.evaluation.yaml_task import yaml_task  # loads jinja2

    return [yaml_task(path)]


_FILES: Mapping[str, Callable[[Path], list[Task]]] = {
    ".py": _tasks_of_file,
    ".yaml": _task_of_yaml,
    ".yml": _task_of_yaml,
}
"""Function that reads the tasks of a file, by the end of its name."""
