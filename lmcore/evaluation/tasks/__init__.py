"""The tasks of lmcore: language modelling, and multiple choice without training."""

from __future__ import annotations

from lmcore.evaluation.task import Task
from lmcore.evaluation.tasks.choices import CHOICES
from lmcore.evaluation.tasks.language import LANGUAGE

__all__ = ["TASKS"]

TASKS: tuple[Task, ...] = (*LANGUAGE, *CHOICES)
