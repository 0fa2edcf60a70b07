"""Rows of a task's files, and what the run needs to know of them before the model is built."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from lmcore.base.errors import DataError, LmcoreError, counted, nearest, suggestion, unreadable
from lmcore.config.derived.data_source import Part, RunSources, TaskData
from lmcore.data.input.compression import open_text
from lmcore.data.input.files import detect_format

__all__ = ["TaskRow", "inspect_task", "read_rows"]

_Rows = Generator[tuple[int, dict[str, Any]], None, None]

_SHOWN = 80
_MOST_LABELS = 10_000
_LARGEST = 3.4e38
"""Largest label of a regression."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class TaskRow:
    """Row of a task's file.

    Attributes:
        texts: Texts of the columns, one or two.
        choices: Choices of a question; empty for a classification.
        label: Name of the class; for multiple choice the number of the right choice; for a
            regression the number to predict.
        where: File and line, for messages.
    """

    texts: tuple[str, ...]
    choices: tuple[str, ...]
    label: str | int | float
    where: str


def read_rows(files: Sequence[str], task: TaskData) -> Iterator[TaskRow]:
    """Yield the rows of a task's files, in order.

    Args:
        files: CSV or TSV with a header, or JSON lines.
        task: Columns.

    Raises:
        DataError: A file cannot be read, a column is missing, or a text or label is.
    """
    for path in files:
        kind = detect_format(path).format
        if kind not in {"csv", "tsv", "jsonl"}:
            raise DataError(
                f"`{path}` is not a table of labelled texts",
                why=f"its format is {kind}",
                hint="give CSV, TSV or JSON lines: `.csv`, `.tsv`, `.jsonl`",
            )
        with open_text(path) as stream:
            if kind == "jsonl":
                lines = _json_rows(stream, path, task)
            else:
                lines = _table_rows(stream, path, kind, task)
            with closing(lines) as rows:
                for number, values in rows:
                    yield _row(values, task, f"`{path}` line {number}")


def inspect_task(sources: RunSources) -> tuple[RunSources, list[LmcoreError]]:
    """Read the files of a task.

    Args:
        sources: Sources of a run with a task.

    Returns:
        The sources with the names of the classes, the number of choices and of rows; and the
        problem of each part's files.
    """
    task, problems = sources.task, list[LmcoreError]()
    assert task is not None
    for part, blend in sources.own.items():
        files = blend.sources[0].files
        if not all(Path(path).is_file() for path in files):
            break  # the rules of the configuration report it
        try:
            task = _with_part(task, part, files)
        except LmcoreError as problem:
            problems.append(problem)
            break  # what validation may have depends on the training data
    return replace(sources, task=task), problems


def _with_part(task: TaskData, part: Part, files: Sequence[str]) -> TaskData:
    known = {*task.labels}
    first: dict[str, str] = {}
    rows, choices = 0, task.num_choices
    for row in read_rows(files, task):
        rows += 1
        choices = max(choices, len(row.choices))
        if isinstance(row.label, str) and row.label not in first:
            first[row.label] = row.where
            if known and row.label not in known:
                raise _unknown(row, task, part)
            if len(first) > _MOST_LABELS:
                raise DataError(
                    f"column `{task.label}` has more than {_MOST_LABELS:,} classes",
                    hint="is it the column of the labels? name another one by `--task-label`",
                )
    if not rows:
        names = ", ".join(f"`{path}`" for path in files)
        raise DataError(f"{names} has no rows", hint="give a file with labelled texts")
    if not task.choices and not task.labels and not task.regression:
        if len(first) < 2:
            raise DataError(
                f"column `{task.label}` has one class only: {_shown(next(iter(first)))}",
                why="there is nothing to tell apart",
                hint="name another column by `--task-label`, or give all classes by "
                "`--task-labels`",
            )
        task = replace(task, labels=_in_order(first))
    return replace(task, num_choices=choices, rows={**task.rows, part: rows})


def _in_order(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names sorted, as numbers if all are."""
    if all(label.isdecimal() for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


def _unknown(row: TaskRow, task: TaskData, part: Part) -> DataError:
    given = "`--task-labels` names" if part == "train" else "training has"
    return DataError(
        f"{row.where}: the class {_shown(str(row.label))} is unknown",
        why=f"{given} {counted(len(task.labels), 'class', 'classes')}",
        hint=f"{suggestion(str(row.label), task.labels)}; or name all classes by `--task-labels`",
    )


def _table_rows(stream: BinaryIO, path: str, kind: str, task: TaskData) -> _Rows:
    csv.field_size_limit(sys.maxsize)
    # TSV has no quotes, as in GLUE.
    dialect: Any = {"delimiter": ","}
    if kind == "tsv":
        dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, **dialect)
    try:
        header = next(reader, None)
        line = reader.line_num
        if header is not None:
            _check_columns(header, task, f"`{path}` line 1")
        for fields in reader:
            number, line = line + 1, reader.line_num
            if not fields:
                continue
            if header is None or len(fields) != len(header):
                raise DataError(
                    f"`{path}` line {number} has {counted(len(fields), 'field')}, the header "
                    f"{len(header or ())}",
                    hint="a CSV quotes fields that have a comma or a line end; a TSV has no quotes",
                )
            yield number, dict(zip(header, fields, strict=True))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    except csv.Error as error:
        raise DataError(f"`{path}` line {reader.line_num} cannot be read", why=str(error)) from None
    finally:
        text.detach()


def _json_rows(stream: BinaryIO, path: str, task: TaskData) -> _Rows:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"`{path}` line {number} is not JSON", why=str(error)) from None
        if not isinstance(values, dict):
            raise DataError(f"`{path}` line {number} is not a JSON object")
        _check_columns(list(values), task, f"`{path}` line {number}")
        yield number, values


def _not_utf8(path: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"`{path}` is not UTF-8", why=unreadable(error), hint="convert the file to UTF-8"
    )


def _row(values: Mapping[str, Any], task: TaskData, where: str) -> TaskRow:
    texts = tuple(_text(values[name], f"column `{name}`", where) for name in task.text)
    if not any(text.strip() for text in texts):
        raise DataError(f"{where}: the text is empty", hint="leave the row out")
    value = values[task.label]
    if task.regression:
        return TaskRow(texts, (), _number(value, task.label, where), where)
    label = _label(value, task.label, where)
    if not task.choices:
        return TaskRow(texts, (), label, where)
    choices = _choices(values, task.choices, where)
    return TaskRow(texts, choices, _right(label, choices, task.choices, where), where)


def _check_columns(columns: Sequence[str], task: TaskData, where: str) -> None:
    """Raise an error if a header, or an object, lacks or repeats a column that the flags name."""
    flags = {
        "--task-text": task.text,
        "--task-label": (task.label,),
        "--task-choices": task.choices,
    }
    lacking = {name: flag for flag, names in flags.items() for name in names if name not in columns}
    for name in dict.fromkeys(name for names in flags.values() for name in names):
        if columns.count(name) > 1:
            raise DataError(
                f"{where}: there are {columns.count(name)} columns `{name}`",
                hint="give each column a name of its own",
            )
    if not lacking:
        return
    named = ", ".join(f"`{key:.40}`" for key in columns[:_SHOWN])
    given = " and ".join(f"`{flag}`" for flag in dict.fromkeys(lacking.values()))
    close = nearest(next(iter(lacking)), columns) if len(lacking) == 1 else None
    meant = f"did you mean `{close}`? " if close else ""
    raise DataError(
        f"{where}: there is no column {' and no column '.join(f'`{name}`' for name in lacking)}",
        why=f"its columns are {named}" if columns else "it names no columns",
        hint=f"{meant}name the column{'s' * (len(lacking) > 1)} by {given}",
    )


def _text(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is `{json.dumps(value):.{_SHOWN}}`, not a text")
    return value


def _label(value: Any, column: str, where: str) -> str:
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value)
    found = _text(value, f"the label, column `{column}`,", where).strip()
    if not found:
        raise DataError(
            f"{where}: the label, column `{column}`, is empty",
            hint="leave rows without a label out",
        )
    return found


def _number(value: Any, column: str, where: str) -> float:
    """Return the label of a regression, as exactly as float32 has it."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not abs(found) <= _LARGEST:
        raise DataError(
            f"{where}: the label, column `{column}`, is `{json.dumps(value):.{_SHOWN}}`, not a "
            "number",
            why="a regression predicts numbers that are finite in float32",
            hint="leave rows without a number out",
        )
    return found


def _choices(values: Mapping[str, Any], columns: tuple[str, ...], where: str) -> tuple[str, ...]:
    found = [values[name] for name in columns]
    listed = len(columns) == 1
    if listed and isinstance(found[0], list):
        found = found[0]
    choices = tuple(_text(one, "a choice", where) for one in found)
    if not listed:  # a table has empty cells where a question has fewer choices
        while choices and not choices[-1].strip():
            choices = choices[:-1]
    if len(choices) < 2:
        raise DataError(
            f"{where}: the question has {counted(len(choices), 'choice')}",
            why="multiple choice has two or more",
            hint="name all columns of choices by `--task-choices`, or one with a JSON list",
        )
    return choices


def _right(label: str, choices: tuple[str, ...], columns: tuple[str, ...], where: str) -> int:
    """Return the number of the right choice."""
    if label.isascii() and label.isdecimal():
        number = int(label)
    elif len(label) == 1 and label in _LETTERS:
        number = _LETTERS.index(label)
    elif label in columns and len(columns) > 1:
        number = columns.index(label)
    elif choices.count(label) == 1:
        number = choices.index(label)
    else:
        number = len(choices)
    if number >= len(choices):
        raise DataError(
            f"{where}: {_shown(label)} is none of the {len(choices)} choices",
            hint="the label is the number of the right choice from 0, its letter (A, B, ...), the "
            "name of its column, or its text",
        )
    return number


def _shown(label: str) -> str:
    return f"`{label:.{_SHOWN}}`"
