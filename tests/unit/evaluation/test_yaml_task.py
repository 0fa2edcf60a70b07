"""Tasks of YAML files: their examples by hand, beside a Python file, and files that are wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.evaluation.chosen import named_tasks
from lmcore.evaluation.files import examples_of
from lmcore.evaluation.task import Choices, Continued, Example, Text

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/evaluate.md"
HEAD = "name: mine\nsummary: Mine.\nfiles: mine*.jsonl\n"
CHOICES = HEAD + "kind: choices\ncontext: 'Q: {{ q }}'\nchoices: a\ngold: right\n"
ROW = {"q": "Is it?", "a": ["yes", "no"], "right": 1}


def examples(folder: Path, text: str, *rows: dict[str, Any]) -> list[Example]:
    """Return the examples of rows, by the task of a YAML file."""
    (folder / "mine.yaml").write_text(text)
    data = folder / "mine.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in rows))
    (task,) = named_tasks([str(folder / "mine.yaml")], ())
    return examples_of(task, [data])


@pytest.mark.parametrize(
    "text,row,expected",
    [
        (CHOICES, ROW, Choices(("Q: Is it?",), (" yes", " no"), 1)),
        (
            CHOICES.replace("right", "'{{ a[1] }}'"),
            ROW,
            Choices(("Q: Is it?",), (" yes", " no"), 1),
        ),
        (
            HEAD + "kind: choices\ncontext: '{{ q.stem }}'\nchoices: q.a\n"
            "gold: '{{ \"AB\".index(key) }}'\nchoice: '\n{{ choice }}.'\n",
            {"q": {"stem": "Is it?", "a": ["yes", "no"]}, "key": "A"},
            Choices(("Is it?",), (" yes.", " no."), 0),
        ),
        (
            HEAD + "kind: choices\ncontext: 'It is '\nchoices: ['{{ x }}', no]\ngold: 0\n"
            "choice: '{{ choice }}'\nmetrics: [acc]\n",
            {"x": "so"},
            Choices(("It is ",), ("so", "no"), 0),
        ),
        (
            HEAD + "kind: end\ncontext: '{{ a }}'\nend: ' {{ b }}'\n",
            {"a": "It", "b": "is"},
            Continued("It", " is"),
        ),
        (HEAD + "kind: text\ntext: '{{ a }}!'\n", {"a": "It"}, Text("It!", "It!")),
    ],
)
def test_examples(tmp_path: Path, text: str, row: dict[str, Any], expected: Example) -> None:
    assert examples(tmp_path, text, row) == [expected]


def test_the_file_of_the_page_is_the_python_file_of_the_page(tmp_path: Path) -> None:
    page = PAGE.read_text()
    python = re.search(r"```python\n(# mine\.py\n.*?)```", page, re.DOTALL)
    yaml = re.search(r"```yaml\n(# mine\.yaml\n.*?)```", page, re.DOTALL)
    assert python is not None
    assert yaml is not None
    row = {"question": "What melts?", "answers": ["ice", "a stone"], "right": 0}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    found = []
    for name, text in {"mine.py": python[1], "mine.yaml": yaml[1]}.items():
        (tmp_path / name).write_text(text)
        (task,) = named_tasks([str(tmp_path / name)], ())
        values = (task.name, task.summary, task.files, task.metrics)
        found.append((values, examples_of(task, [tmp_path / "mine.jsonl"])))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "text,message,help_text",
    [
        (CHOICES + "contxt: a\n", "has the key `contxt`", "did you mean `context`"),
        (CHOICES + "text: a\n", "has the key `text`", "known: "),
        (CHOICES.replace("kind: choices", "kind: choice"), "`kind: choice` of", "`choices`"),
        (CHOICES.replace("kind: choices\n", ""), "has no `kind`", "kind: choices"),
        (CHOICES.replace("gold: right\n", ""), "has no `gold`", "gold: ..."),
        (CHOICES.replace("{{ q }}", "{{ q"), "`context` of .* is no template", ""),
        (CHOICES.replace("files: mine*.jsonl", "files: {}"), "`files` of .* is not a text", ""),
        ("- a\n", "defines no task", "name: ..."),
        ("a: [\n", "is not YAML", ""),
        ("a: !!python/object/apply:os.system [ls]\n", "is not a task of lmcore", "--harness"),
        (CHOICES.replace("gold: right", "gold: !function f.x"), "is not a task of lm", "--harness"),
        ("a: " + "[" * 1500, "is not YAML", ""),
        ("#" * 70000, "cannot read the task", ""),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str, help_text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        named_tasks([str(tmp_path / "mine.yaml")], ())
    assert help_text in str(caught.value.hint)


@pytest.mark.parametrize(
    "text,row,message",
    [
        (CHOICES, {"q": "a"}, "has no field `a`"),
        (CHOICES, {"a": ["b"], "right": 0}, "the template `context` fails for line 1 of"),
        (CHOICES, ROW | {"right": 2}, "has a label outside the set"),
        (CHOICES, ROW | {"right": "maybe"}, "is not the number of a choice"),
        (CHOICES.replace("{{ q }}", "{{ q.__class__.mro() }}"), ROW, "`context` fails .*"),
        (CHOICES.replace("{{ q }}", "{{ q * 3000000 }}"), ROW, "is too long"),
    ],
)
def test_wrong_rows(tmp_path: Path, text: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        examples(tmp_path, text, row)


@pytest.mark.parametrize(
    "text,metric,fitting",
    [
        (HEAD + "kind: text\ntext: '{{ q }}'\n", "acc", "`loss`"),
        (HEAD + "kind: end\ncontext: a\nend: b\n", "acc_norm", "`acc`"),
        (CHOICES, "word_perplexity", "`acc_norm`"),
    ],
)
def test_metrics_of_another_kind(tmp_path: Path, text: str, metric: str, fitting: str) -> None:
    """The file is refused before any data are read; the hint has the metrics that fit."""
    with pytest.raises(ConfigError, match=f"has the metric `{metric}`") as caught:
        examples(tmp_path, f"{text}metrics: [{metric}]\n")
    assert fitting in str(caught.value.hint)
    assert f"`{metric}`" not in str(caught.value.hint)
