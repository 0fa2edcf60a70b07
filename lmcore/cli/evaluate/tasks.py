"""Tasks that `lmcore evaluate` is asked for: their files, and the list of all."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, MissingPackageError, printable
from lmcore.cli.evaluate.retrieval import NQ, RELEASE, SUMMARY, TOPS

if TYPE_CHECKING:
    from lmcore.cli.evaluate.section import EvaluateSection
    from lmcore.evaluation.plugin_tasks import KnownTasks
    from lmcore.evaluation.task import Task
    from lmcore.plugin import PluginSet

__all__ = ["files_of_tasks", "list_tasks", "require_no_flag_of_checkpoint", "wanted_tasks"]

_TEXT = "text"
_CHECKPOINT_FLAGS = ("--load", "--pretrained-checkpoint")
"""Flags of a checkpoint in Megatron's commands."""


def require_no_flag_of_checkpoint(argv: Sequence[str], plugins: PluginSet) -> None:
    """Raise for a checkpoint that is given by a flag, as in Megatron's commands.

    Args:
        argv: Arguments of the command.
        plugins: Plugins, which may have tasks.

    Raises:
        ConfigError: There is one; or there is no such task, which comes first.
    """
    given: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = given.setdefault(name, [])
            values += [value] if equals else []
        else:
            values.append(word)
    flag = next((one for one in _CHECKPOINT_FLAGS if one in given), None)
    if flag is None:
        return
    from lmcore.evaluation.chosen import named_tasks
    from lmcore.evaluation.finetune import TUNED
    from lmcore.evaluation.plugin_tasks import known_tasks

    other = {NQ, *(task.name for task in TUNED)}
    names = [one for each in given.get("--task", []) for one in each.split(",") if one not in other]
    named_tasks(names, known_tasks(plugins).all)
    command = ["lmcore", "evaluate", *(given[flag] or ["CHECKPOINT"])]
    command += ["--task", *given["--task"]] if given.get("--task") else []
    raise ConfigError(
        f"`{' '.join([flag, *given[flag]])}`: a checkpoint is given without a flag",
        hint=f"`{shlex.join(command)}`, and the other flags",
    )


def list_tasks(asked: Sequence[str], known: KnownTasks) -> None:
    """Print the tasks that are asked for, or all of them.

    Args:
        asked: Values of `--task`.
        known: Tasks to choose from.
    """
    from lmcore.evaluation.chosen import named_tasks

    brought = {task.name: distribution for task, distribution in known.added}
    listed = named_tasks(asked, known.all) if asked else known.all
    width = max(16, *(len(task.name) + 2 for task in (*known.all, *listed)))
    for task in listed:
        # The same patterns in directories within add nothing for a reader.
        within = {one for each in task.files for one in (f"*/{each}", f"*/*/{each}")}
        files = ", ".join([*(one for one in task.files if one not in within), f"of {task.release}"])
        print(f"{task.name:<{width}}{printable(task.summary)}")
        print(f"{'':<{width}}{', '.join(task.metrics)}; files: {printable(files)}")
        if task.name in brought:
            print(f"{'':<{width}}from {brought[task.name]}")
    if asked:
        return
    print(f"{NQ:<{width}}{SUMMARY}")
    print(f"{'':<{width}}{', '.join(f'top{one}' for one in TOPS)}; with --index; files: {RELEASE}")
    from lmcore.evaluation.finetune import TUNED

    print("\nwith --finetune:\n")
    for own in TUNED:
        print(f"{own.name:<{width}}{own.summary}")
        print(f"{'':<{width}}{', '.join(own.metrics)}; files: {own.release}")


def wanted_tasks(section: EvaluateSection, known: Sequence[Task]) -> list[tuple[Task, list[Path]]]:
    """Return the tasks with their files.

    Args:
        section: Options of the command.
        known: Tasks to choose from.

    Raises:
        ConfigError, DataError: The options contradict each other, or files are missing.
    """
    from lmcore.evaluation.chosen import chosen_tasks
    from lmcore.evaluation.files import find_files
    from lmcore.evaluation.task import Task
    from lmcore.evaluation.tasks.language import plain_text

    if not section.checkpoints:
        raise ConfigError(
            "`lmcore evaluate` needs a checkpoint",
            why="paths after `--task` and `--task-data` are taken as their values",
            hint="`lmcore evaluate runs/my-run --task lambada --task-data evals`",
        )
    _require_harness(section)
    found = chosen_tasks(section.task, section.task_data, known, flag="--task")
    if section.text is not None:
        metrics = ("loss", "token_perplexity", "word_perplexity", "bits_per_byte")
        task = Task(_TEXT, "A text.", (), plain_text, metrics, "you")
        found.append((task, find_files(task, Path(section.text))))
    if section.data_path:
        from lmcore.evaluation.indexed import indexed_task

        found += [(indexed_task(one), [Path(one)]) for one in dict.fromkeys(section.data_path)]
    if not found and not section.harness:
        raise ConfigError(
            "`lmcore evaluate` needs a task, a text, or a data set",
            why=f"the tasks are {', '.join(task.name for task in known)}",
            hint="`--task lambada --task-data evals`, `--text FILE`, or `--data-path PREFIX`",
        )
    return found


def files_of_tasks(section: EvaluateSection) -> list[Path]:
    """Return the files that define tasks.

    Args:
        section: Options of the command.
    """
    names = [one.strip() for each in section.task for one in each.split(",")]
    return [Path(one) for one in names if Path(one).suffix in {".py", ".yaml", ".yml"}]


def _require_harness(section: EvaluateSection) -> None:
    """Raise if tasks of lm-eval-harness, or the options for them, cannot be used.

    Raises:
        ConfigError: An option is for tasks that are not asked for, or there is no such directory.
        MissingPackageError: lm-eval-harness is not installed.
    """
    if section.harness:
        if importlib.util.find_spec("lm_eval") is None:
            raise MissingPackageError(
                "lm_eval", needed_for="`--harness`", install="pip install lm_eval"
            )
        if section.harness_include and not Path(section.harness_include).is_dir():
            raise ConfigError(
                f"`--harness-include {section.harness_include}` is no directory",
                hint="give the directory that has the YAML files",
            )
        return
    given = {
        "--harness-include": section.harness_include,
        "--num-fewshot": section.num_fewshot,
        "--apply-chat-template": section.apply_chat_template or None,
    }
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(
                f"`{flag}` needs `--harness`", why="it is an option of lm-eval-harness's tasks"
            )
