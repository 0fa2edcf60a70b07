"""Rows of a task's files in each format, and what is refused, with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import DataError, LmcoreError
from lmcore.config.derived.data_source import Blend, DataSource, RunSources, TaskData
from lmcore.data.task.table import inspect_task, read_rows

CLASSES = TaskData("classification", ("a", "b"), "label")
CHOICES = TaskData("multiple-choice", ("q",), "label", ("choices",))


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def inspected(task: TaskData, **files: str) -> tuple[TaskData, list[LmcoreError]]:
    """Return what is found in the files of each part, and the problems."""
    own: Any = {
        part: Blend("task_data", (DataSource(path, files=(path,)),)) for part, path in files.items()
    }
    sources, problems = inspect_task(RunSources(None, own, task=task))
    assert sources.task is not None
    return sources.task, problems


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.csv.gz"])
def test_formats(name: str, tmp_path: Path) -> None:
    """CSV with quotes, TSV without, JSON lines, compressed: the same rows, with their lines."""
    text = {
        "x.csv": 'id,a,b,label\n1,"x, y",z,yes\n2,"two\nlines",w,no\n',
        "x.tsv": 'id\ta\tb\tlabel\n1\tx, y\tz\tyes\n2\t"two\tw\tno\n',
        "x.jsonl": '{"a": "x, y", "b": "z", "label": "yes"}\n\n'
        '{"b": "w", "a": "two\\nlines", "label": "no"}\n',
    }[name.removesuffix(".gz")]
    path = tmp_path / name
    content = text.encode()
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    rows = list(read_rows([str(path)], CLASSES))
    second = '"two' if "tsv" in name else "two\nlines"
    assert [row.texts for row in rows] == [("x, y", "z"), (second, "w")]
    assert [row.label for row in rows] == ["yes", "no"]
    assert rows[1].where == f"`{path}` line 3"


@pytest.mark.parametrize(
    "values, labels",
    [
        (["no", "yes", "maybe"], ("maybe", "no", "yes")),
        ([10, 9, 2], ("2", "9", "10")),
        ([True, False], ("false", "true")),
    ],
)
def test_classes_of_the_data(values: list[Any], labels: tuple[str, ...], tmp_path: Path) -> None:
    """Sorted, numbers by value; the rows of each part are counted."""
    lines = [json.dumps({"a": "x", "b": "y", "label": value}) + "\n" for value in values]
    train = write(tmp_path / "train.jsonl", "".join(lines * 2))
    valid = write(tmp_path / "valid.jsonl", lines[0])
    found, problems = inspected(CLASSES, train=train, valid=valid)
    assert not problems
    assert (found.labels, found.num_labels) == (labels, len(labels))
    assert found.rows == {"train": 2 * len(values), "valid": 1}


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,b,label\n", "has no rows"),
        ("", "has no rows"),
        ("a,b,label\nx,y,yes\nx,y,\n", "line 3: the label, column `label`, is empty"),
        ("a,b,kind\nx,y,yes\n", "line 1: there is no column `label`"),
        ("a,c,label\nx,y,yes\n", "line 1: there is no column `b`"),
        ("c,d,kind\n", "line 1: there is no column `a` and no column `b` and no column `label`"),
        ("a,b,label,a\nx,y,yes,z\n", "line 1: there are 2 columns `a`"),
        ("\na,b,label\nx,y,yes\n", "line 1: there is no column `a` and no column `b`"),
        ("a,b,label\nx,y,yes\nx,y\n", "line 3 has 2 fields, the header 3"),
        ("a,b,label\nx,y,yes\n , ,no\n", "line 3: the text is empty"),
        ("a,b,label\nx,y,yes\nx,z,yes\n", "has one class only: `yes`"),
        (b"a,b,label\nx,\xff,yes\n", "is not UTF-8"),
    ],
)
def test_wrong_tables(text: str | bytes, message: str, tmp_path: Path) -> None:
    """Each is named with its file and, if it is of one row, the line."""
    path = tmp_path / "x.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    _, problems = inspected(CLASSES, train=str(path))
    (problem,) = problems
    assert message in problem.what
    assert str(path) in problem.what or "column" in problem.what


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"a": "x", "b": "y"}', "line 1: there is no column `label`"),
        ('{"a": 1, "b": "y", "label": "c"}', "line 1: column `a` is `1`, not a text"),
        ('{"a": "x", "b": "y", "label": null}', "the label, column `label`, is `null`"),
        ('{"a": "x", "b": "y", "label": 0.5}', "the label, column `label`, is `0.5`"),
    ],
)
def test_wrong_lines(line: str, message: str, tmp_path: Path) -> None:
    """JSON lines have types; a label is a text, an integer or a truth value."""
    path = write(tmp_path / "x.jsonl", line + "\n")
    with pytest.raises(DataError) as caught:
        list(read_rows([path], CLASSES))
    assert message in caught.value.what


def test_the_flags_of_missing_columns(tmp_path: Path) -> None:
    """The hint names each flag once, and the column that one alone is a slip for."""
    path = write(tmp_path / "x.csv", "a,b,lable\nx,y,yes\n")
    with pytest.raises(DataError) as caught:
        list(read_rows([path], CLASSES))
    assert caught.value.why == "its columns are `a`, `b`, `lable`"
    assert caught.value.hint == "did you mean `lable`? name the column by `--task-label`"
    other = TaskData("classification", ("first", "second"), "kind")
    with pytest.raises(DataError) as caught:
        list(read_rows([path], other))
    assert caught.value.hint == "name the columns by `--task-text` and `--task-label`"


def test_files_that_do_not_exist_are_reported_once(tmp_path: Path) -> None:
    """The rules of the configuration name them, so that the reader is silent."""
    train = write(tmp_path / "train.csv", "a,b,label\nx,y,yes\nx,y,no\n")
    found, problems = inspected(CLASSES, train=train, valid=str(tmp_path / "valid.csv"))
    assert not problems
    assert found.rows == {"train": 2}
    assert inspected(CLASSES, train=str(tmp_path)) == (CLASSES, [])


def test_a_class_that_training_does_not_have(tmp_path: Path) -> None:
    """The row of validation is named, with the classes; the same for classes given by name."""
    train = write(tmp_path / "train.csv", "a,b,label\nx,y,yes\nx,y,no\n")
    valid = write(tmp_path / "valid.csv", "a,b,label\nx,y,no\nx,y,yess\n")
    _, (problem,) = inspected(CLASSES, train=train, valid=valid)
    assert problem.what == f"`{valid}` line 3: the class `yess` is unknown"
    assert problem.why == "training has 2 classes"
    assert "did you mean `yes`?" in str(problem.hint)
    named = TaskData("classification", ("a", "b"), "label", labels=("yes", "perhaps"))
    _, (problem,) = inspected(named, train=train)
    assert problem.what == f"`{train}` line 3: the class `no` is unknown"
    assert problem.why == "`--task-labels` names 2 classes"


def test_another_format(tmp_path: Path) -> None:
    """A file that is no table is refused."""
    path = write(tmp_path / "x.txt", "text\n")
    with pytest.raises(DataError, match="is not a table of labelled texts"):
        list(read_rows([path], CLASSES))


@pytest.mark.parametrize(
    "label, right", [(0, 0), ("2", 2), ("B", 1), ("gamma", 2), ("C", 2), ("alpha", 0)]
)
def test_right_choice(label: Any, right: int, tmp_path: Path) -> None:
    """By number from 0, letter or text, from a list of JSON lines."""
    row = {"q": "which?", "choices": ["alpha", "beta", "gamma"], "label": label}
    path = write(tmp_path / "x.jsonl", json.dumps(row))
    (found,) = read_rows([path], CHOICES)
    assert found.choices == ("alpha", "beta", "gamma")
    assert found.label == right


def test_choices_in_columns(tmp_path: Path) -> None:
    """A table has a column for each choice; at its end cells may be empty."""
    text = "q,c1,c2,c3,label\nwhich?,x,y,z,c3\nor?,x,y,,1\n"
    columns = TaskData("multiple-choice", ("q",), "label", ("c1", "c2", "c3"))
    path = write(tmp_path / "x.csv", text)
    found, problems = inspected(columns, train=path)
    assert not problems
    assert (found.labels, found.num_choices, found.num_labels) == ((), 3, 3)
    assert [(row.choices, row.label) for row in read_rows([path], columns)] == [
        (("x", "y", "z"), 2),
        (("x", "y"), 1),
    ]


@pytest.mark.parametrize(
    "choices, label, message",
    [
        (["x", "y"], 2, "`2` is none of the 2 choices"),
        (["x", "y"], "C", "`C` is none of the 2 choices"),
        (["x", "x"], "x", "`x` is none of the 2 choices"),
        (["x"], 0, "the question has 1 choice"),
        ("x", 0, "the question has 1 choice"),
        (["x", 3], 0, "a choice is `3`, not a text"),
    ],
)
def test_wrong_choices(choices: Any, label: Any, message: str, tmp_path: Path) -> None:
    """They are named."""
    row = json.dumps({"q": "which?", "choices": choices, "label": label})
    path = write(tmp_path / "x.jsonl", row)
    with pytest.raises(DataError) as caught:
        list(read_rows([path], CHOICES))
    assert message in caught.value.what
