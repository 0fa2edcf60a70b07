"""Scores of a head on the files of a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.evaluation.finetune.files import name_of
from lmcore.evaluation.finetune.metrics import TUNED_METRICS
from lmcore.evaluation.finetune.record import require_head
from lmcore.evaluation.run import TaskProgress
from lmcore.evaluation.score import Metric

if TYPE_CHECKING:
    from lmcore.evaluation.finetune.files import TaskFile
    from lmcore.evaluation.finetune.model import HeadModel
    from lmcore.evaluation.finetune.record import LabelledRow, TunedTask
    from lmcore.evaluation.replicas import Replicas

__all__ = ["FileScore", "PartScore", "example_records", "score_files", "together"]


@dataclass(frozen=True)
class FileScore:
    """Predictions for a file.

    Attributes:
        name: Name of the file, or folder.
        rows: Its rows.
        scores: Outputs of the head for each row.
        found: Number of the class or choice, or number, that is predicted for each row.
        wanted: The right ones; empty for a file without labels.
        metrics: The metrics by name; empty for a file without labels.
        cut: Number of rows that are longer than the sequence.
    """

    name: str
    rows: Sequence[LabelledRow]
    scores: Sequence[Sequence[float]]
    found: Sequence[float]
    wanted: Sequence[float]
    metrics: Mapping[str, Metric]
    cut: int

    @property
    def correct(self) -> int:
        """Number of rows whose class or choice is predicted."""
        return sum(a == b for a, b in zip(self.wanted, self.found, strict=True))


@dataclass(frozen=True)
class PartScore:
    """Scores of several files.

    Attributes:
        files: Score of each.
        metrics: The metrics of all rows with labels.
        seconds: Time of the predictions.
    """

    files: Sequence[FileScore]
    metrics: Mapping[str, Metric]
    seconds: float

    @property
    def total(self) -> int:
        """Number of rows with labels."""
        return sum(len(one.wanted) for one in self.files)

    @property
    def correct(self) -> int:
        """Number of rows whose class or choice is predicted."""
        return sum(one.correct for one in self.files if one.wanted)


def score_files(
    head: HeadModel,
    task: TunedTask,
    read: Sequence[TaskFile],
    *,
    tokens: int,
    progress: Callable[[TaskProgress], None] = lambda _progress: None,
    pool: Replicas | None = None,
) -> PartScore:
    """Return the scores of a head on files of a task.

    Args:
        head: The model.
        task: The task.
        read: The files or folders.
        tokens: Tokens of a pass.
        progress: Called after some passes.
        pool: Replicas that compute the passes; None: this model alone.

    Raises:
        ConfigError: The head is not the task's.
        RunError: The head's numbers are not finite.
    """
    require_head(task, head.task, head.labels, head.checkpoint)
    total, count, begin = sum(len(one.rows) for one in read), 0, time.perf_counter()

    def done(more: int) -> None:
        nonlocal count
        count += more
        progress(TaskProgress(task.name, count, total, time.perf_counter() - begin))

    files = []
    for one_file in read:
        name, rows = name_of(one_file.path), one_file.rows
        outputs = head.predict(rows, tokens=tokens, progress=done, pool=pool)
        found = [_predicted(task, head, one) for one in outputs.scores]
        wanted = [_right(task, row) for row in rows] if one_file.is_labelled else []
        metrics = _metrics(task, wanted, found)
        files.append(FileScore(name, rows, outputs.scores, found, wanted, metrics, outputs.cut))
    return together(task, files, time.perf_counter() - begin)


def together(task: TunedTask, files: Sequence[FileScore], seconds: float) -> PartScore:
    """Return the scores of several files, with the metrics of all their rows.

    Args:
        task: The task.
        files: Score of each.
        seconds: Time of the predictions.
    """
    labelled = [one for one in files if one.wanted]
    wanted = [value for one in labelled for value in one.wanted]
    found = [value for one in labelled for value in one.found]
    return PartScore(files, _metrics(task, wanted, found), seconds)


def _metrics(task: TunedTask, wanted: Sequence[float], found: Sequence[float]) -> dict[str, Metric]:
    return {name: TUNED_METRICS[name](wanted, found) for name in task.metrics} if wanted else {}


def _predicted(task: TunedTask, head: HeadModel, scores: Sequence[float]) -> float:
    """Return the number of the class in the task's order or of the choice; or the number."""
    if task.head == "regression":
        return scores[0]
    best = max(range(len(scores)), key=scores.__getitem__)
    return task.labels.index(head.labels[best]) if task.labels else best


def _right(task: TunedTask, row: LabelledRow) -> float:
    return row.label if isinstance(row.label, int | float) else task.labels.index(str(row.label))


def example_records(task: TunedTask, scored: FileScore) -> Iterator[dict[str, Any]]:
    """Yield each row and what is predicted for it, for JSON lines.

    Args:
        task: The task.
        scored: Score of a file.
    """
    for number, row in enumerate(scored.rows):
        found = scored.found[number]
        yield {
            "file": scored.name,
            "example": number,
            "texts": list(row.texts),
            "choices": list(row.choices),
            "label": row.label,
            "predicted": task.labels[int(found)] if task.labels else found,
            "outputs": list(scored.scores[number]),
        }
