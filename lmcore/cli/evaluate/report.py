"""Tables and JSON of the scores of heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import printable

if TYPE_CHECKING:
    from lmcore.evaluation.finetune.record import TunedTask
    from lmcore.evaluation.finetune.score import PartScore
    from lmcore.evaluation.score import Metric

__all__ = ["aligned", "metrics_record", "part_record", "part_rows", "shown"]


def part_record(task: TunedTask, part: PartScore) -> dict[str, Any]:
    """Return the JSON object of the scores on some files.

    Args:
        task: The task.
        part: The scores.
    """
    counts = task.head != "regression"
    files = {}
    for one in part.files:
        record: dict[str, Any] = {"examples": len(one.rows), "cut": one.cut}
        if one.wanted:
            record |= {"correct": one.correct} if counts else {}
            record["metrics"] = metrics_record(one.metrics)
        files[one.name] = record
    return {
        "examples": part.total,
        **({"correct": part.correct} if counts else {}),
        "cut": sum(one.cut for one in part.files),
        "seconds": round(part.seconds, 3),
        "metrics": metrics_record(part.metrics),
        "files": files,
    }


def metrics_record(metrics: Mapping[str, Metric]) -> dict[str, dict[str, float | None]]:
    """Return value and error of each metric; null, which JSON has, for what is not finite.

    Args:
        metrics: The metrics by name.
    """
    return {
        name: {
            key: value if value is None or math.isfinite(value) else None
            for key, value in dataclasses.asdict(metric).items()
        }
        for name, metric in metrics.items()
    }


def part_rows(task: TunedTask, record: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield rows of a table: file, examples, metric, value; the files, then all of them.

    Args:
        task: The task.
        record: Result of `part_record`.
    """
    whole = {"all files": record} if len(record["files"]) > 1 else {}
    for name, one in {**record["files"], **whole}.items():
        for metric in task.metrics if one.get("metrics") else ():
            value = shown(one["metrics"][metric])
            if metric == "acc":
                value += f" ({one['correct']:,} of {one['examples']:,})"
            yield [printable(name), f"{one['examples']:,}", metric, value]


def shown(metric: Mapping[str, float | None]) -> str:
    """Return a metric of `metrics_record` for a table.

    Args:
        metric: Value and error.
    """
    value, error = metric["value"], metric["error"]
    if value is None:
        return "undefined"
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the lines of a table.

    Args:
        rows: Cells of each row; the first row is the head.
    """
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
