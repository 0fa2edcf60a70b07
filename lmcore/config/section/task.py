"""Section `task`: a head for a task, and the labelled texts that it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import setting
from lmcore.config.option import CHECKED, PREFIXES, option

_TASK = setting("--task").else_error("it describes the data of a task")
_CHOICE = setting("--task", "multiple-choice")
_CLASSES = setting("--task", "classification")


@dataclass(frozen=True)
class TaskSection:
    """Task whose head replaces the heads of pretraining, and its data."""

    task: str | None = option(
        None,
        "Train a head for a task in place of the heads of pretraining: classification of texts or "
        "pairs of texts, multiple choice, or regression: a number for each text or pair.",
        choices=("classification", "multiple-choice", "regression"),
        on_resume=CHECKED,
    )
    task_data: tuple[str, ...] = option(
        (),
        "Files with the labelled texts to train on: CSV, TSV or JSON lines, compressed or not.",
        metavar="FILE",
        on_resume=CHECKED,
        needs=_TASK,
        paths=PREFIXES,
    )
    task_valid_data: tuple[str, ...] = option(
        (),
        "Files with the labelled texts of validations, like task_data.",
        metavar="FILE",
        needs=_TASK,
        paths=PREFIXES,
    )
    task_text: tuple[str, ...] = option(
        ("text",),
        "Names of the one or two columns with the text; for multiple choice with the context, the "
        "question, or both.",
        metavar="COLUMN",
        on_resume=CHECKED,
        needs=_TASK,
    )
    task_choices: tuple[str, ...] = option(
        ("choices",),
        "Names of the columns with the choices, or of one column of JSON lines with a list.",
        metavar="COLUMN",
        on_resume=CHECKED,
        needs=_CHOICE,
    )
    task_choice_tokens: int | None = option(
        None,
        "Most tokens of a choice, with the question before it; longer ones are cut at the end. "
        "Default: cut to seq_length only.",
        minimum=1,
        on_resume=CHECKED,
        needs=_CHOICE,
    )
    task_label: str = option(
        "label",
        "Name of the column with the class; for multiple choice with the number of the right "
        "choice from 0, its letter, its column or its text; for regression with the number.",
        metavar="COLUMN",
        on_resume=CHECKED,
        needs=_TASK,
    )
    task_labels: tuple[str, ...] = option(
        (),
        "Names of the classes, in the order of the head's outputs; default: those of task_data, "
        "sorted.",
        metavar="NAME",
        on_resume=CHECKED,
        needs=_CLASSES,
    )
