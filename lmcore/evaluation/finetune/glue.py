"""Tasks of GLUE, from the tables of its release: TSV without quotes."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.errors import DataError, counted, unreadable
from lmcore.data.input.compression import open_text
from lmcore.evaluation.finetune.record import LabelledRow, Part, Recipe, TunedTask, cleaned

__all__ = ["GLUE"]

logger = logging.getLogger(__name__)

_LONGEST = 1 << 24
"""Most bytes of a line."""
_SHOWN = 60
_UNLABELLED = {"", "-"}
"""Labels of rows without one: MNLI's raters did not agree on them."""
_USUAL = Recipe()


@dataclass(frozen=True)
class _Table:
    """Columns of a table.

    Attributes:
        texts: Names of the columns with the texts.
        label: Name of the column with the label; a table without it has no labels.
        labels: Labels that there are; empty: a number.
        without_header: Names of the columns of a table whose first line is a row.
        skips: True to leave out rows with another number of fields or an empty text, as Megatron
            does; False: they are errors.
    """

    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...] = ()
    without_header: tuple[str, ...] = ()
    skips: bool = False


def _rows(table: _Table, path: Path) -> Iterator[LabelledRow]:
    """Yield the rows of a table.

    Raises:
        DataError: The file cannot be read, a column is missing, a row has another number of fields,
            or a label is outside the set; the line is named.
    """
    lines = _lines(path)
    number, fields = next(lines, (1, None))
    if fields is None:
        raise DataError(f"`{path}` is empty", hint="copy the file of the release again")
    columns: Sequence[str] = fields
    if table.without_header and not set(table.texts) <= {*fields}:
        columns = table.without_header
        lines = _with_first(number, fields, lines)
    texts = [_place(name, columns, path) for name in table.texts]
    label = columns.index(table.label) if table.label in columns else None
    left_out = 0
    for number, fields in lines:
        where = f"line {number} of `{path}`"
        wrong = len(fields) != len(columns)
        if table.skips and (wrong or not all(cleaned(fields[place]) for place in texts)):
            left_out += 1
            continue
        if wrong:
            raise DataError(
                f"{where} has {counted(len(fields), 'field')}, the table {len(columns)}",
                hint="fields are separated by tabs, and have no quotes around them",
            )
        found = tuple(cleaned(fields[place]) for place in texts)
        value = None if label is None else _label(fields[label].strip(), table, where)
        yield LabelledRow(found, (), value, where)
    if left_out:
        logger.warning(
            "`%s`: %s left out, with an empty text or another number of fields",
            path,
            counted(left_out, "row"),
        )


def _with_first(
    number: int, fields: list[str], lines: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, list[str]]]:
    yield number, fields
    yield from lines


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield number and fields of each line that is not empty."""
    with open_text(str(path)) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST), b""), 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"line {number} of `{path}` is not UTF-8", why=unreadable(error)
                ) from error
            if text:
                yield number, text.split("\t")


def _place(name: str, columns: Sequence[str], path: Path) -> int:
    if columns.count(name) == 1:
        return columns.index(name)
    listed = ", ".join(f"`{one:.{_SHOWN}}`" for one in columns[:20])
    raise DataError(
        f"line 1 of `{path}` names {columns.count(name) or 'no'} column{'s' * (name in columns)} "
        f"`{name}`",
        why=f"its columns: {listed}",
        hint="separate the fields by tabs, without quotes, as GLUE's release does"
        if len(columns) == 1 and set(columns[0]) & {",", ";", "|"}
        else "is it a file of another task, or of another layout than GLUE's release?",
    )


def _label(text: str, table: _Table, where: str) -> str | float:
    if table.labels:
        if text in table.labels:
            return text
        raise DataError(
            f"{where} has a label outside the set",
            why=f"column `{table.label}` is `{text:.{_SHOWN}}`; the labels are "
            + ", ".join(f"`{one}`" for one in table.labels),
            hint="leave rows without a label out"
            if text in _UNLABELLED
            else "correct the row; is it a file of another task, or of another layout?",
        )
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{where} has a label that is no number",
            why=f"column `{table.label}` is `{text:.{_SHOWN}}`",
            hint="leave rows without a label out",
        )
    return number


def _files(folder: str, **parts: Sequence[str]) -> dict[Part, list[list[str]]]:
    """Return the patterns of each part, in the folder of the task or the data itself."""
    return {
        part: [[f"{folder}/{name}", f"*/{folder}/{name}", name] for name in parts[part]]
        for part in ("train", "valid", "test")
    }


def _task(
    name: str,
    folder: str,
    table: _Table,
    summary: str,
    *,
    metrics: tuple[str, ...] = ("acc",),
    recipe: Recipe = _USUAL,
    suffixes: Sequence[str] = ("",),
) -> TunedTask:
    files = _files(
        folder,
        train=["train.tsv"],
        valid=[f"dev{one}.tsv" for one in suffixes],
        test=[f"test{one}.tsv" for one in suffixes],
    )
    return TunedTask(
        name,
        summary,
        "classification" if table.labels else "regression",
        files,
        functools.partial(_rows, table),
        table.labels,
        metrics,
        f"GLUE's release, the folder `{folder}` with `train.tsv` and `dev{suffixes[0]}.tsv`",
        pair=len(table.texts) == 2,
        recipe=recipe,
        label=table.label,
    )


_ENTAILED = ("entailment", "not_entailment")
_YES_NO = ("0", "1")
_SENTENCES = ("sentence1", "sentence2")
_SMALL = Recipe(epochs=5)

GLUE = (
    _task(
        "mnli",
        "MNLI",
        # The order of Megatron's labels, from 0.
        _Table(_SENTENCES, "gold_label", ("contradiction", "entailment", "neutral")),
        "Whether a sentence follows from another, contradicts it or neither.",
        suffixes=("_matched", "_mismatched"),
    ),
    _task(
        "qqp",
        "QQP",
        _Table(("question1", "question2"), "is_duplicate", _YES_NO, skips=True),
        "Whether two questions mean the same.",
        metrics=("acc", "f1"),
    ),
    _task(
        "qnli",
        "QNLI",
        _Table(("question", "sentence"), "label", _ENTAILED),
        "Whether a sentence has the answer to a question.",
    ),
    _task(
        "sst2",
        "SST-2",
        _Table(("sentence",), "label", _YES_NO),
        "Whether a sentence about a film is positive.",
    ),
    _task(
        "rte",
        "RTE",
        _Table(_SENTENCES, "label", _ENTAILED),
        "Whether a sentence follows from another.",
        recipe=Recipe(epochs=5, seq_length=256),
    ),
    _task(
        "mrpc",
        "MRPC",
        _Table(("#1 String", "#2 String"), "Quality", _YES_NO),
        "Whether two sentences of the news mean the same.",
        metrics=("acc", "f1"),
        recipe=_SMALL,
    ),
    _task(
        "cola",
        "CoLA",
        _Table(
            ("sentence",), "label", _YES_NO, without_header=("source", "label", "star", "sentence")
        ),
        "Whether a sentence is acceptable English.",
        metrics=("mcc", "acc"),
        recipe=_SMALL,
    ),
    _task(
        "stsb",
        "STS-B",
        _Table(_SENTENCES, "score"),
        "How similar two sentences are, from 0 to 5.",
        metrics=("pearson", "spearman", "mse"),
        recipe=_SMALL,
    ),
)
