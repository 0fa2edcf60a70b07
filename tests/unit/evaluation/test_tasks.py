"""Examples of each task in the layouts of the releases, and files that are wrong."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.evaluation.chosen import named_tasks
from lmcore.evaluation.files import examples_of, find_files
from lmcore.evaluation.score import check_kind
from lmcore.evaluation.task import Choices, Continued, Example, Task, Text, TextFile
from lmcore.evaluation.tasks import TASKS
from lmcore.evaluation.tasks.language import plain_text, wikitext_text

BY_NAME = {task.name: task for task in TASKS}


def written(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(name: str, path: Path) -> list[Example]:
    return examples_of(BY_NAME[name], [path])


SCIENCE = {
    "id": "1",
    "question": {
        "stem": "What melts?",
        "choices": [{"text": "ice", "label": "A"}, {"text": "a stone", "label": "B"}],
    },
    "answerKey": "A",
}
COLLECTED = {"query": "What melts?", "choices": ["ice", "a stone"], "gold": 0}
MELTS = (" ice", " a stone")


@pytest.mark.parametrize(
    "name,row,expected",
    [
        ("arc_easy", SCIENCE, Choices(("Question: What melts?\nAnswer:",), MELTS, 0)),
        ("arc_challenge", COLLECTED, Choices(("Question: What melts?\nAnswer:",), MELTS, 0)),
        ("openbookqa", SCIENCE, Choices(("What melts?",), MELTS, 0)),
        ("openbookqa", COLLECTED, Choices(("What melts?",), MELTS, 0)),
        (
            "piqa",
            {"goal": "Melt ice", "sol1": "warm it", "sol2": "cool it", "label": 1},
            Choices(("Question: Melt ice\nAnswer:",), (" warm it", " cool it"), 1),
        ),
        (
            "hellaswag",
            {
                "activity_label": "Melting ice",
                "ctx_a": "A man holds ice.",
                "ctx_b": "he",
                "endings": ["waits. [title] It melts  now.", "[step] runs."],
                "label": 0,
            },
            Choices(
                ("Melting ice: A man holds ice. He",), (" waits.. It melts now.", "  runs."), 0
            ),
        ),
        (
            "winogrande",
            {
                "sentence": "Ann saw _ wave.",
                "option1": "Ann",
                "option2": "Bo",
                "answer": "2",
            },
            Choices(("Ann saw Ann", "Ann saw Bo"), (" wave.", " wave."), 1),
        ),
        ("lambada", {"text": "It is a dog"}, Continued("It is a", " dog", whole=False)),
        ("lambada_strict", {"text": "It is a dog"}, Continued("It is a", " dog")),
    ],
)
def test_layouts(tmp_path: Path, name: str, row: dict[str, Any], expected: Example) -> None:
    assert read(name, written(tmp_path / "file.jsonl", [row])) == [expected]


def test_labels_beside_the_questions(tmp_path: Path) -> None:
    row = {"goal": "Melt ice", "sol1": "warm it", "sol2": "cool it"}
    path = written(tmp_path / "piqa/valid.jsonl", [row, row])
    (tmp_path / "piqa/valid-labels.lst").write_text("1\n0\n")
    assert [one.gold for one in read("piqa", path)] == [1, 0]
    (tmp_path / "piqa/valid-labels.lst").write_text("1\n")
    with pytest.raises(DataError, match=r"line 2 of .* has no label beside it"):
        read("piqa", path)


def test_questions_of_an_article(tmp_path: Path) -> None:
    row = {
        "article": "Ice \n melts.",
        "questions": ["What melts?", "Is it cold?"],
        "options": [["ice", "a stone"], ["yes", "no"]],
        "answers": ["A", "B"],
    }
    before = "Article: Ice melts.\n\nQuestion: "
    assert read("race", written(tmp_path / "1.txt", [row])) == [
        Choices((f"{before}What melts?\nAnswer:",), MELTS, 0),
        Choices((f"{before}Is it cold?\nAnswer:",), (" yes", " no"), 1),
    ]


@pytest.mark.parametrize(
    "question,context,answers",
    [
        ("Ice melts in the  _  .", "Ice melts in the", (" sun.", " dark.")),
        ("Ice melts in the _", "Ice melts in the", (" sun.", " dark.")),
        ("In the ____ ice melts.", "In the", (" sun ice melts.", " dark ice melts.")),
        ("In the _ , ice melts.", "In the", (" sun, ice melts.", " dark, ice melts.")),
        ("_ melts ice.", "", ("sun melts ice.", "dark melts ice.")),
    ],
)
def test_a_sentence_with_a_blank(
    tmp_path: Path, question: str, context: str, answers: tuple[str, ...]
) -> None:
    """Answers are in the place of the blank, as in the earlier questions of lm-eval-harness."""
    row = {
        "article": "Ice.",
        "questions": [question],
        "options": [["sun.", "dark."]],
        "answers": ["B"],
    }
    found = read("race", written(tmp_path / "1.txt", [row]))
    assert found == [Choices((f"Article: Ice.\n\n{context}",), answers, 1)]


def test_articles_of_wikitext(tmp_path: Path) -> None:
    path = tmp_path / "wiki.test.tokens"
    path.write_text(
        " \n = One = \n \n A well @-@ known one , of 3 @.@ 5 m . \n = = Part = = \n = Two = \n b \n"
    )
    first, second = read("wikitext2", path)
    assert isinstance(first, Text)
    assert first.text == "\n= One =\n\nA well-known one, of 3.5 m.\n== Part ==\n"
    assert first.original.split()[:6] == ["=", "One", "=", "A", "well", "@-@"]
    assert second == Text(" = Two =\nb\n", " = Two = \n b \n")


@pytest.mark.parametrize(
    "words,plain",
    [
        ("a @-@ b", "a-b"),
        ("1 @,@ 000", "1,000"),
        ("( a )", "(a)"),
        ('" a "', '"a"'),
        ("it 's", "it's"),
        ("a . b", "a. b"),
        ("= = a = =", "== a =="),
    ],
)
def test_marks_of_wikitext(words: str, plain: str) -> None:
    assert wikitext_text(words) == plain


@pytest.mark.parametrize(
    "name,row,message",
    [
        ("arc_easy", {"question": "x"}, "the field `question` of line 1 of .* is not an object"),
        ("arc_easy", SCIENCE | {"answerKey": "D"}, "has a label outside the set"),
        ("openbookqa", COLLECTED | {"gold": 2}, "has a label outside the set"),
        ("openbookqa", COLLECTED | {"gold": "b"}, "`gold` of line 1 .* is not a whole number"),
        (
            "openbookqa",
            COLLECTED | {"choices": []},
            "is not a list of texts",
        ),
        ("hellaswag", {"text": "a"}, "line 1 of .* has no field `ctx_b`"),
        ("winogrande", {"sentence": "no blank"}, "is not a sentence with `_`"),
        ("lambada", {"text": "word"}, "is not a text of several words"),
        (
            "race",
            {"article": "a", "questions": ["b"], "answers": ["A"]},
            "a list of options",
        ),
        ("piqa", [], "line 1 of .* is no JSON object"),
    ],
)
def test_other_layouts(tmp_path: Path, name: str, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(name, written(tmp_path / "file.jsonl", [row]))


def test_files_without_examples(tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no examples of the task `arc_easy`"):
        read("arc_easy", tmp_path / "file.jsonl")
    (tmp_path / "file.jsonl").write_text('{"a": 1}\nnothing\n')
    with pytest.raises(DataError, match="line 1"):
        read("arc_easy", tmp_path / "file.jsonl")


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    (one,) = plain_text(tmp_path / "a.txt")
    assert isinstance(one, TextFile)
    assert "".join(one.pieces()) == "one\ntwo"
    path = written(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    assert list(plain_text(path)) == [Text("one", "one"), Text("two", "two")]


@pytest.mark.parametrize(
    "name,path",
    [
        ("arc_easy", "ARC-Easy/ARC-Easy-Test.jsonl"),
        ("arc_easy", "ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Test.jsonl"),
        ("lambada", "lambada/lambada_test.jsonl"),
        ("hellaswag", "hellaswag_val.jsonl"),
        ("race", "RACE/test/high/1.txt"),
        ("winogrande", "winogrande_1.1/dev.jsonl"),
        ("wikitext103", "wikitext-103/wiki.test.tokens"),
    ],
)
def test_files_of_releases_are_found(tmp_path: Path, name: str, path: str) -> None:
    whole = tmp_path / path
    whole.parent.mkdir(parents=True, exist_ok=True)
    whole.write_text("x")
    (tmp_path / "other.jsonl").write_text("x")
    assert find_files(BY_NAME[name], tmp_path) == [whole]
    assert find_files(BY_NAME[name], whole) == [whole]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no file of the task `piqa`") as caught:
        find_files(BY_NAME["piqa"], tmp_path)
    assert "the release of PIQA, `valid.jsonl`" in str(caught.value.hint)
    with pytest.raises(DataError, match="there is no"):
        find_files(BY_NAME["piqa"], tmp_path / "nothing")


def test_names_of_tasks() -> None:
    assert [one.name for one in named_tasks(["piqa,race", "lambada"], TASKS)] == [
        *("piqa", "race", "lambada")
    ]
    with pytest.raises(ConfigError, match="no task `lambda`") as caught:
        named_tasks(["lambda"], TASKS)
    assert "`lambada`" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="named twice"):
        named_tasks(["piqa", "piqa"], TASKS)


@pytest.mark.parametrize(
    "name,count", [("lambada", None), ("arc_easy", None), ("openbookqa", 500), ("race", None)]
)
def test_real_files(name: str, count: int | None, shared_data: Path) -> None:
    """The shared files have examples, whose labels are all used."""
    task: Task = BY_NAME[name]
    examples = examples_of(task, find_files(task, shared_data / "evals"))
    assert len(examples) == (count or len(examples)) > 50
    golds = {one.gold for one in examples if isinstance(one, Choices)}
    assert not golds or golds >= {0, 1, 2, 3}


OWN = """
from lmcore.evaluation.files import json_rows
from lmcore.evaluation.task import Choices, Task


def questions(path):
    for row in json_rows(path):
        choices = tuple(f" {one}" for one in row.texts("answers"))
        yield Choices((row.text("question"),), choices, row.number("right"))


MINE = Task("mine", "Mine.", ("mine.jsonl",), questions, ("acc",), "me")
"""


def test_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    task, other = named_tasks([f"{tmp_path / 'own.py'},piqa"], TASKS)
    assert (task.name, other) == ("mine", BY_NAME["piqa"])
    row = {"question": "What melts?", "answers": ["ice", "a stone"], "right": 0}
    path = written(tmp_path / "mine.jsonl", [row])
    assert find_files(task, tmp_path) == [path]
    assert examples_of(task, [path]) == [Choices(("What melts?",), MELTS, 0)]


@pytest.mark.parametrize(
    "content,message",
    [("1 / 0", "fails"), ("x = 1", "defines no task"), (None, "there is no file")],
)
def test_wrong_files_of_the_user(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "own.py").write_text(content)
    with pytest.raises(ConfigError, match=message):
        named_tasks([str(tmp_path / "own.py")], TASKS)


@pytest.mark.parametrize(
    "made,message",
    [
        ("Choices(('a',), (' b', ' c'), 7)", "example 1 of .* has a label outside the set"),
        ("Choices(('a',), (' b', ' c'), -1)", "example 1 of .* has a label outside the set"),
        ("Choices(('a', 'b'), (' b', ' c', ' d'), 0)", "has 2 contexts for 3 choices"),
        ("5", "example 1 of the task `mine` is no example"),
        ("1 / 0", "the task `mine` fails after 0 examples"),
    ],
)
def test_wrong_examples_of_the_user(tmp_path: Path, made: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "from lmcore.evaluation.task import Choices, Task\n"
        f"def made(path):\n    yield {made}\n"
        "MINE = Task('mine', 'Mine.', ('mine.jsonl',), made, ('acc',), 'me')\n"
    )
    (task,) = named_tasks([str(tmp_path / "own.py")], TASKS)
    with pytest.raises(DataError, match=message):
        examples_of(task, [tmp_path / "mine.jsonl"])


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace('"mine"', '"lambada"'))
    with pytest.raises(ConfigError, match="has the name of another task"):
        named_tasks([str(tmp_path / "own.py")], TASKS)
    with pytest.raises(ConfigError, match="which is a path"):
        named_tasks([str(tmp_path)], TASKS)


def test_the_folder_of_race(tmp_path: Path) -> None:
    path = tmp_path / "test/high/1.txt"
    path.parent.mkdir(parents=True)
    path.write_text("x")
    assert find_files(BY_NAME["race"], tmp_path) == [path]


@pytest.mark.parametrize("place", ["RACE/dev/high", "RACE/dev", "RACE", "."])
def test_a_part_of_race(tmp_path: Path, place: str) -> None:
    """A folder of articles, a part of the release, and the release itself have its files."""
    path = tmp_path / "RACE/dev/high/12.txt"
    path.parent.mkdir(parents=True)
    path.touch()
    (tmp_path / "notes.txt").touch()
    assert find_files(BY_NAME["race"], tmp_path / place) == [path]


def test_a_text_without_words(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n \n" * 9)
    with pytest.raises(DataError, match="has no words"):
        list(plain_text(tmp_path / "blank.txt"))


@pytest.mark.parametrize("task", TASKS)
def test_metrics_fit_the_examples(task: Task) -> None:
    """Each task's metrics are defined for its examples."""
    hints = typing.get_type_hints(task.examples)["return"]
    for kind in typing.get_args(typing.get_args(hints)[0]) or typing.get_args(hints):
        check_kind(task, kind)
