"""RACE with training: questions about an article, from the folders of its release."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcore.base.errors import DataError
from lmcore.evaluation.finetune.record import LabelledRow, Part, Recipe, TunedTask, cleaned
from lmcore.evaluation.tasks.choices import race_questions

__all__ = ["RACE"]

_RECIPE = Recipe(
    lr=1e-5, seq_length=512, global_batch_size=16, micro_batch_size=4, choice_tokens=128
)


def _rows(path: Path) -> Iterator[LabelledRow]:
    """Yield the questions of a folder with files `.txt`, or of one file."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"`{path}` has no files `.txt`", hint="give a folder of RACE's release")
    for file in files:
        for found in race_questions(file):
            if len(found.options) < 2:
                raise DataError(
                    f"{found.where} has a question with one choice",
                    why="there is nothing to choose",
                )
            choices = tuple(_asked(found.question, one) for one in found.options)
            yield LabelledRow((cleaned(found.article),), choices, found.gold, found.where)


def _asked(question: str, choice: str) -> str:
    """Return the question with a choice in its blank, or after it."""
    if "_" not in question:
        return cleaned(f"{question} {choice}")
    # A function: backslashes of a choice mean nothing.
    return cleaned(re.sub("_+", lambda _blank: choice, question))


def _task(name: str, levels: Sequence[str], summary: str) -> TunedTask:
    places: dict[Part, str] = {"train": "train", "valid": "dev", "test": "test"}
    files = {
        part: [[f"{folder}/{level}", f"[Rr][Aa][Cc][Ee]*/{folder}/{level}"] for level in levels]
        for part, folder in places.items()
    }
    return TunedTask(
        name,
        summary,
        "multiple-choice",
        files,
        _rows,
        (),
        ("acc",),
        "the release of RACE, a folder with `train/middle`, `train/high`, `dev/middle` and so on",
        pair=False,
        recipe=_RECIPE,
        label="answers",
    )


RACE = (
    _task("race", ("middle", "high"), "Questions about an article, of English examinations."),
    _task("race_middle", ("middle",), "The same, of examinations for ages 12 to 15."),
    _task("race_high", ("high",), "The same, of examinations for ages 15 to 18."),
)
