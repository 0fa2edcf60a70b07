"""Section `evaluation`: tasks that score the model while it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import setting
from lmcore.config.option import FREE, NAMED, SCRIPTS, option

_TASKS = setting("--eval-tasks")


@dataclass(frozen=True)
class EvaluationSection:
    """Tasks that score the model while it is trained."""

    eval_tasks: tuple[str, ...] = option(
        (),
        "Tasks of `lmcore evaluate` that score the model in training, by name; or a Python or YAML "
        "file that defines some.",
        metavar="NAME",
        on_resume=FREE,
        paths=SCRIPTS,
    )
    eval_tasks_data: tuple[str, ...] = option(
        (),
        "Directory with the files of eval_tasks in the layouts of their releases; or `NAME=FILE`, "
        "the file of one task.",
        metavar="DIR",
        on_resume=FREE,
        needs=_TASKS.else_error("these are the files of the tasks that score the model"),
        paths=NAMED,
    )
    eval_tasks_interval: int = option(
        0,
        "Steps between scores of eval_tasks, which the last step has, too; 0: only after the last.",
        minimum=0,
        on_resume=FREE,
        needs=_TASKS.or_off(0).else_error("it is the interval of those tasks"),
    )
    eval_tasks_limit: int | None = option(
        None,
        "Take this many examples from the beginning of each of eval_tasks.",
        minimum=1,
        on_resume=FREE,
        needs=_TASKS.else_error("it is the number of examples of those tasks"),
    )
