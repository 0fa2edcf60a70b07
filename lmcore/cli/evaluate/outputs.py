"""Files of results of `lmcore evaluate`: what may be replaced, the JSON object and the table."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import is_device, write_atomically
from lmcore.base.errors import ConfigError, RunError, printable
from lmcore.cli.evaluate.report import aligned, metrics_record
from lmcore.cli.text.sample_output import check_output_file

if TYPE_CHECKING:
    from lmcore.evaluation.harness.run import HarnessResult
    from lmcore.evaluation.run import TaskResult

    Result = TaskResult | HarnessResult

__all__ = ["check_outputs", "check_replaced", "note_replaced", "report", "table", "write_results"]

logger = logging.getLogger(__name__)

_MAX_RESULTS = 1 << 24
"""Most bytes of a file of results, far above what there are."""
_MAX_RECORD = 1 << 26
"""Most bytes of the first line of a file of examples."""


def check_outputs(output: str | None, examples: str | None, inputs: Iterable[Path]) -> None:
    """Raise if the files of results cannot be made, or are files that are read.

    Args:
        output: Value of `--output`.
        examples: Value of `--examples`.
        inputs: Files that the evaluation reads.

    Raises:
        ConfigError: A path cannot become a file, both are one file, or one is an input.
    """
    given = {"--output": output, "--examples": examples}
    read = {path.resolve() for path in inputs}
    for flag, path in given.items():
        if path is None:
            continue
        check_output_file(Path(path), flag)
        if Path(path).resolve() in read:
            raise ConfigError(
                f"`{flag} {path}` is a file that the evaluation reads",
                why="it would be replaced",
                hint="name another file",
            )
    both = [Path(path).resolve() for path in given.values() if path is not None]
    if len(set(both)) < len(both):
        raise ConfigError("`--output` and `--examples` name the same file", hint="give two files")


def check_replaced(output: str | None, examples: str | None) -> None:
    """Raise if a file would be replaced that this command has not written.

    Args:
        output: Value of `--output`.
        examples: Value of `--examples`.

    Raises:
        ConfigError: There is such a file.
    """
    refused = None
    if output is not None and not _has_results(Path(output)):
        refused = f"`--output {output}` exists, and has no results of `lmcore evaluate`"
    elif examples is not None and not _may_be_replaced(Path(examples)):
        refused = f"`--examples {examples}` exists, and has no examples of `lmcore evaluate`"
    if refused:
        hint = "name another file, or remove it"
        raise ConfigError(refused, why="it would be replaced", hint=hint)


def note_replaced(output: str, checkpoints: Sequence[str], tasks: Sequence[str] | None) -> None:
    """Warn if results of other checkpoints or tasks are replaced.

    Args:
        output: Value of `--output`, a file that may be replaced.
        checkpoints: Names of the checkpoints.
        tasks: Names of the tasks; None: they are not known yet.
    """
    found = _results(Path(output)) or {}
    lost = [
        f"`{task}` of `{checkpoint}`"
        for checkpoint, results in found.items()
        for task in results
        if checkpoint not in checkpoints or (tasks is not None and task not in tasks)
    ]
    if lost:
        shown = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
        logger.warning(
            "`%s` has results of another evaluation, which are replaced: %s",
            printable(output),
            printable(shown),
        )


def _has_results(path: Path) -> bool:
    """Return True if there is no such file, or it has results of this command, of any kind."""
    if not path.exists() or is_device(path) or _results(path) is not None:
        return True
    try:
        values = json.loads(read_bounded_file(path, _MAX_RESULTS))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.keys() >= {"task", "checkpoint", "seeds", "best"}


def _results(path: Path) -> dict[str, dict[str, Any]] | None:
    """Return the results in a file; None if it has none, or something else."""
    try:
        values = json.loads(read_bounded_file(path, _MAX_RESULTS))
        results = [task for one in values.values() for task in one.values()]
        known = bool(results) and all({"examples", "metrics"} <= task.keys() for task in results)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return values if known else None


def _may_be_replaced(path: Path) -> bool:
    """Return True if there is no such file, or it has examples of this command, or nothing."""
    if not path.exists() or is_device(path):
        return True
    try:
        with path.open("rb") as stream:
            line = stream.readline(_MAX_RECORD)
        record = json.loads(line) if line else {"checkpoint": "", "task": ""}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and list(record)[:2] == ["checkpoint", "task"]


def write_results(path: Path, content: str) -> None:
    """Write the JSON object of an evaluation to a file.

    Args:
        path: The file.
        content: The object, without a line end.

    Raises:
        RunError: The file cannot be written, such as on a full disk.
    """
    try:
        write_atomically(path, (content + "\n").encode())
    except OSError as error:
        raise RunError(f"cannot write `{path}`", why=error.strerror or str(error)) from error


def report(found: Sequence[tuple[str, list[Result]]]) -> dict[str, object]:
    """Return the JSON object: for each checkpoint and task the metrics, errors and counts.

    Args:
        found: Name and results of each checkpoint.
    """
    return {
        checkpoint: {
            result.name: {
                "examples": result.count,
                "cut_contexts": result.cut,
                "seconds": round(result.seconds, 3),
                "metrics": metrics_record(result.metrics),
                **result.details(),
            }
            for result in results
        }
        for checkpoint, results in found
    }


def table(found: Sequence[tuple[str, list[Result]]]) -> str:
    """Return the table: a row for each metric of a task, a column for each checkpoint.

    Args:
        found: Name and results of each checkpoint.
    """
    heads = [printable(checkpoint) for checkpoint, _ in found]
    rows = [["task", "examples", "metric", *heads]]
    for number, first in enumerate(found[0][1]):
        for name in first.metrics:
            values = []
            for _, results in found:
                one = results[number].metrics[name]
                error = "" if one.error is None else f" ± {one.error:.4f}"
                values.append(f"{one.value:.4f}{error}")
            rows.append([first.name, f"{first.count:,}", name, *values])
    return aligned(rows)
