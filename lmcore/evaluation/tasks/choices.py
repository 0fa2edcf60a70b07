"""Tasks of multiple choice, by the probability of each answer after its question.

The prompts are lm-eval-harness's.  Each task reads its own release, and the layout of
collections: `query`, `choices`, `gold`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.errors import DataError
from lmcore.evaluation.files import Row, json_rows, read_text
from lmcore.evaluation.task import Choices, Task, within

__all__ = ["CHOICES", "RaceQuestion", "race_questions"]

_METRICS = ("acc", "acc_norm")
_LETTERS = "ABCDEFGHIJ"
_RACE = ("test/*/*.txt", "dev/*.txt", "dev/*/*.txt")


def _question(context: str, answers: Sequence[str], gold: int, row: Row) -> Choices:
    """Return an example with one context, a space before each answer."""
    return Choices((context,), tuple(f" {one}" for one in answers), row.chosen(gold, answers))


def _collected(row: Row) -> tuple[str, tuple[str, ...], int]:
    """Return question, answers and number of the right one of a row of a collection."""
    return row.text("query"), row.texts("choices"), row.number("gold")


def _plain_activity(text: str) -> str:
    """Return a text of HellaSwag without the marks of WikiHow."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(path: Path) -> Iterator[Choices]:
    for row in json_rows(path):
        if "query" in row.values:
            yield _question(*_collected(row), row)
            continue
        begin = row.text("ctx_b")
        begin = begin[:1].upper() + begin[1:].lower()
        context = _plain_activity(f"{row.text('activity_label')}: {row.text('ctx_a')} {begin}")
        endings = [_plain_activity(one) for one in row.texts("endings")]
        yield _question(context, endings, row.number("label"), row)


def _piqa(path: Path) -> Iterator[Choices]:
    labels = _labels_beside(path)
    for number, row in enumerate(json_rows(path)):
        if "query" in row.values:
            query, answers, gold = _collected(row)
        else:
            query, answers = row.text("goal"), (row.text("sol1"), row.text("sol2"))
            if labels is not None and number >= len(labels):
                raise DataError(
                    f"{row.where} has no label beside it",
                    why=f"`{path.stem}-labels.lst` ends before",
                )
            gold = row.number("label", "gold") if labels is None else labels[number]
        yield _question(f"Question: {query}\nAnswer:", answers, gold, row)


def _labels_beside(path: Path) -> list[int] | None:
    """Return the labels of PIQA, which are in a second file; None without one."""
    beside = path.with_name(f"{path.stem}-labels.lst")
    if not beside.is_file():
        return None
    try:
        return [int(one) for one in read_text(beside).split()]
    except ValueError as error:
        raise DataError(f"`{beside}` has something else than labels", why=str(error)) from error


def _arc(path: Path) -> Iterator[Choices]:
    for row in json_rows(path):
        if "query" in row.values:
            query, answers, gold = _collected(row)
            query = query.removeprefix("Question: ")
        else:
            query, answers, gold = _science(row)
        yield _question(f"Question: {query}\nAnswer:", answers, gold, row)


def _openbookqa(path: Path) -> Iterator[Choices]:
    for row in json_rows(path):
        query, answers, gold = _collected(row) if "query" in row.values else _science(row)
        yield _question(query, answers, gold, row)


def _science(row: Row) -> tuple[str, tuple[str, ...], int]:
    """Return question, answers and number of the right one in the layout of ARC."""
    question = row.row("question")
    choices = question.rows("choices")
    labels = [one.text("label") for one in choices]
    answer = row.text("answerKey").strip()
    if answer not in labels:
        raise DataError(
            f"{row.where} has a label outside the set",
            why=f"`answerKey` is `{answer:.20}`, the choices are {', '.join(labels)}",
        )
    texts = tuple(one.text("text") for one in choices)
    return question.text("stem"), texts, labels.index(answer)


def _winogrande(path: Path) -> Iterator[Choices]:
    for row in json_rows(path):
        sentence = row.text("sentence")
        before, blank, after = sentence.partition("_")
        if not blank:
            raise row.wrong("sentence", sentence, "a sentence with `_` for the blank")
        options = (row.text("option1"), row.text("option2"))
        gold = row.chosen(row.number("answer") - 1, options)
        # The options differ before the end that is scored, which is the same for both.
        rest = f" {after.strip()}"
        yield Choices(tuple(before + one for one in options), (rest, rest), gold)


@dataclass(frozen=True)
class RaceQuestion:
    """Question of RACE.

    Attributes:
        article: The article, as it is in the file.
        question: The question, which may have a blank: `_`.
        options: The answers.
        gold: Number of the right one, from 0.
        row: Row of the file.
    """

    article: str
    question: str
    options: tuple[str, ...]
    gold: int
    row: Row

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return self.row.where


def _race(path: Path) -> Iterator[Choices]:
    for one in race_questions(path):
        article = " ".join(one.article.split())
        parts = re.split(r"_+", one.question, maxsplit=1)
        if len(parts) == 2:
            yield _sentence(f"Article: {article}\n\n", str(parts[0]), str(parts[1]), one)
            continue
        context = f"Article: {article}\n\nQuestion: {one.question}\nAnswer:"
        yield _question(context, one.options, one.gold, one.row)


def _sentence(article: str, before: str, after: str, asked: RaceQuestion) -> Choices:
    """Return an example whose answers are put in the place of a blank.

    Args:
        article: The article, as it begins the prompt.
        before, after: Parts of the sentence before and after the blank.
        asked: The question.
    """
    begin, rest = " ".join(before.split()), " ".join(after.split())
    # An answer at the end has the mark of its sentence; elsewhere the sentence goes on after it.
    ends = not rest.strip(".?!_ ")
    answers = [one if ends else f"{one.rstrip('. ')}{_joined(rest)}" for one in asked.options]
    if begin:
        return _question(article + begin, answers, asked.gold, asked.row)
    return Choices((article,), tuple(answers), asked.row.chosen(asked.gold, answers))


def _joined(rest: str) -> str:
    """Return the rest of a sentence with the space before it, if it does not begin with a mark."""
    return rest if rest[:1] in ",.;:?!'" else f" {rest}"


def race_questions(path: Path) -> Iterator[RaceQuestion]:
    """Yield the questions of each article of a file.

    Args:
        path: File of the release, with a JSON object for each article.

    Raises:
        DataError: It cannot be read, or has another layout.
    """
    for number, line in enumerate(read_text(path, 1 << 24).splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of `{path}`"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON", why=str(error)) from error
        row = Row(values if isinstance(values, dict) else {}, where)
        questions, letters = row.texts("questions"), row.texts("answers")
        options = row.values.get("options")
        if not isinstance(options, list) or not len(options) == len(questions) == len(letters):
            raise row.wrong("options", options, "a list of options for each question")
        article = row.text("article")
        for question, letter, listed in zip(questions, letters, options, strict=True):
            answers = Row({"options": listed}, where).texts("options")
            gold = row.chosen(_LETTERS.find(letter), answers)
            yield RaceQuestion(article, question, answers, gold, row)


CHOICES = (
    Task(
        "hellaswag",
        "How a short scene continues, of four endings.",
        (*within("hellaswag_val*.jsonl"), *within("hellaswag*.jsonl")),
        _hellaswag,
        ("acc_norm", "acc"),
        "the release of HellaSwag, `hellaswag_val.jsonl`",
    ),
    Task(
        "piqa",
        "Which of two ways reaches a physical goal.",
        (*within("piqa/valid.jsonl"), *within("physicaliqa*/dev.jsonl"), *within("piqa*.jsonl")),
        _piqa,
        _METRICS,
        "the release of PIQA, `valid.jsonl` with `valid-labels.lst` beside it",
    ),
    Task(
        "arc_easy",
        "Questions of science from school, the easy ones.",
        (*within("ARC-Easy/ARC-Easy-Test.jsonl"), *within("arc_easy*.jsonl")),
        _arc,
        _METRICS,
        "the release of ARC, `ARC-Easy/ARC-Easy-Test.jsonl`",
    ),
    Task(
        "arc_challenge",
        "Questions of science from school, the difficult ones.",
        (*within("ARC-Challenge/ARC-Challenge-Test.jsonl"), *within("arc_challenge*.jsonl")),
        _arc,
        ("acc_norm", "acc"),
        "the release of ARC, `ARC-Challenge/ARC-Challenge-Test.jsonl`",
    ),
    Task(
        "winogrande",
        "Which of two names a pronoun means.",
        (*within("winogrande*/dev.jsonl"), *within("winogrande*.jsonl")),
        _winogrande,
        ("acc",),
        "the release of WinoGrande, `dev.jsonl`",
    ),
    Task(
        "openbookqa",
        "Questions of elementary science, which need common knowledge.",
        (*within("OpenBookQA*/Data/Main/test.jsonl"), *within("openbook*qa*.jsonl")),
        _openbookqa,
        ("acc_norm", "acc"),
        "the release of OpenBookQA, `Data/Main/test.jsonl`",
    ),
    Task(
        "race",
        "Questions about an article, of English examinations.",
        (
            *(f"[Rr][Aa][Cc][Ee]*/{one}" for one in _RACE),
            *_RACE,
            *("high/*.txt", "middle/*.txt", "[0-9]*.txt"),  # a part, or one level of it
        ),
        _race,
        ("acc", "acc_norm"),
        "the release of RACE, a folder with `test/high/*.txt` and `test/middle/*.txt`",
    ),
)
