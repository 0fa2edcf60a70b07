"""`TunedTask`: the record of a task that a head is trained for, and its rows.  Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmcore.base.errors import ConfigError

__all__ = ["PARTS", "LabelledRow", "Part", "Recipe", "TunedTask", "cleaned", "require_head"]

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class LabelledRow:
    """Row of a task.

    Attributes:
        texts: One text, or a pair.
        choices: Choices of a question, each with the question; empty for other tasks.
        label: Name of the class, number of the right choice, or the number of a regression; None:
            the file has no labels.
        where: File and line, for messages.
    """

    texts: tuple[str, ...]
    choices: tuple[str, ...]
    label: str | int | float | None
    where: str


@dataclass(frozen=True)
class Recipe:
    """Settings of the training, unless the user gives others.

    Attributes:
        epochs: Passes over the rows.
        lr: Highest learning rate.
        warmup: Share of the steps in which the learning rate rises.
        seq_length: Tokens of a sequence, at most.
        global_batch_size: Samples of a step.
        micro_batch_size: Samples of a pass on one device, at most.
        choice_tokens: Most tokens of a question with a choice; None: as many as it has.
    """

    epochs: float = 3
    lr: float = 2e-5
    warmup: float = 0.06
    seq_length: int = 128
    global_batch_size: int = 32
    micro_batch_size: int = 8
    choice_tokens: int | None = None


@dataclass(frozen=True)
class TunedTask:
    """Task with files to train on, to choose the best checkpoint by, and to test on.

    Attributes:
        name: Name for `--task`.
        summary: Line that says what it asks.
        head: Value of `lmcore train --task`.
        files: Patterns of the files, or folders, of each part below the directory of the data; of
            each inner sequence, the first pattern that has any is read.
        rows: Yields the rows of a file or folder.
        labels: Names of the classes in the order of the head's outputs; empty for other heads.
        metrics: Names of the metrics, of `lmcore.evaluation.finetune.metrics`; the best checkpoint
            has the highest value of the first one.
        release: Origin of the files, for the message about missing ones.
        pair: True if a row has two texts.
        recipe: Settings of the training.
        label: Name of the column, or field, with the labels.
    """

    name: str
    summary: str
    head: Literal["classification", "multiple-choice", "regression"]
    files: Mapping[Part, Sequence[Sequence[str]]]
    rows: Callable[[Path], Iterator[LabelledRow]]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    release: str
    pair: bool = True
    recipe: Recipe = Recipe()
    label: str = "label"


def cleaned(text: str) -> str:
    """Return a text as Megatron's tasks clean it: single spaces, none before a full stop.

    Args:
        text: Text of a file.

    Source:
        Megatron-LM, `tasks/data_utils.py`, `clean_text`.
    """
    text = re.sub(r"\s+", " ", text.strip())
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


def require_head(task: TunedTask, head: str, labels: Sequence[str], where: Path) -> None:
    """Refuse a checkpoint whose head is not the task's.

    Args:
        task: The task.
        head: Value of `--task` that the head was trained with.
        labels: Names of its classes.
        where: The checkpoint, for messages.

    Raises:
        ConfigError: The head is for another kind of task, or has other classes.
    """
    if head != task.head:
        raise ConfigError(
            f"the head of `{where}` is for {head}, the task `{task.name}` needs {task.head}",
            hint="give a checkpoint that was fine-tuned on this task",
        )
    if {*labels} != {*task.labels}:
        raise ConfigError(
            f"the classes of `{where}` are not those of the task `{task.name}`",
            why=f"the head has {_listed(labels[:20])}, the task {_listed(task.labels)}",
            hint="give a checkpoint that was fine-tuned on this task",
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{one}`" for one in names) or "none"
