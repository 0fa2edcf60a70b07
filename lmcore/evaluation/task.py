"""`Task`: the record of an evaluation task, and the examples that it may have.  Torch-free.

A task is data: where its files are, how a file becomes examples, and which metrics are reported.
How an example is scored follows from its kind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.errors import ConfigError, suggestion

__all__ = [
    "Choices",
    "Continued",
    "Example",
    "Task",
    "Text",
    "TextFile",
    "named_tasks",
    "within",
]


@dataclass(frozen=True)
class Text:
    """Text whose tokens are all predicted, each from those before it.

    Attributes:
        text: The text that the model reads.
        original: Text whose words and bytes are counted, as it is in the file.
    """

    text: str
    original: str


@dataclass(frozen=True)
class TextFile:
    """File whose text is predicted as a `Text`, read in pieces since it may be large.

    Attributes:
        path: The file.
        pieces: Returns the pieces of its text, from the beginning.
    """

    path: Path
    pieces: Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Continued:
    """Text with the end that the model has to predict.

    Attributes:
        context: Text before.
        continuation: The end, with the space between.
        whole: True if all tokens of the end count; False: the last one alone does, and the others
            are read as context.
    """

    context: str
    continuation: str
    whole: bool = True


@dataclass(frozen=True)
class Choices:
    """Question with several answers; the most probable one is the model's.

    Attributes:
        contexts: Text before each answer; one text, if it is the same before all.
        choices: The answers, with the space between.
        gold: Number of the right one, from 0.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int


Example = Text | TextFile | Continued | Choices


@dataclass(frozen=True)
class Task:
    """Evaluation task.

    Attributes:
        name: Name for `--task`.
        summary: Line that says what it asks.
        files: Patterns of its files below the directory of the data; all files of the first pattern
            that has any are read, in the order of their names.
        examples: Yields the examples of one file.
        metrics: Names of the metrics, of `lmcore.evaluation.score`; the first is the main one.
        release: Origin of the files, for the message about missing ones.
    """

    name: str
    summary: str
    files: Sequence[str]
    examples: Callable[[Path], Iterator[Example]]
    metrics: Sequence[str]
    release: str


def _tasks_of_file(path: Path) -> list[Task]:
    """Run a Python file of the user and return the tasks that it defines, in its order."""
    if not path.is_file():
        raise ConfigError(f"there is no file `{path}`", hint="give the path of a Python file")
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


def within(pattern: str) -> tuple[str, ...]:
    """Return patterns of files that are in a directory, or in one or two directories inside.

    Args:
        pattern: Pattern of the files.
    """
    return (pattern, f"*/{pattern}", f"*/*/{pattern}")


def named_tasks(names: Sequence[str], known: Sequence[Task]) -> list[Task]:
    """Return the tasks with given names.

    Args:
        names: Names of tasks, or paths of Python files with tasks of the user; one may have several
            with commas between.
        known: Tasks to choose from.

    Raises:
        ConfigError: There is no such task, it is named twice, or a file has none.
    """
    by_name = {task.name: task for task in known}
    wanted: list[str] = []
    asked = [one.strip() for each in names for one in each.split(",") if one.strip()]
    for name in asked:
        if not name.endswith(".py"):
            wanted.append(name)
            continue
        for task in _tasks_of_file(Path(name)):
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
                hint="give checkpoints before `--task`, and tasks of your own as a Python file",
            )
        if name not in by_name:
            raise ConfigError(
                f"there is no task `{name}`",
                hint=suggestion(name, by_name) or "tasks: " + ", ".join(by_name),
            )
        if wanted.count(name) > 1:
            raise ConfigError(f"the task `{name}` is named twice", hint="name it once")
    return [by_name[name] for name in wanted]
