"""Questions with answers, as in Natural Questions, and the share that a search answers.

A question is answered at K if one of its first K blocks contains one of its answers.
"""

from __future__ import annotations

import ast
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from lmcore.base.errors import DataError, counted, unreadable
from lmcore.base.missing_path import missing_path_hint

__all__ = ["Question", "contains", "place_of_answer", "read_questions", "summary"]

_LONGEST = 1 << 20
"""Most bytes of a line."""
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


@dataclass(frozen=True)
class Question:
    """Question with every text that answers it."""

    text: str
    answers: tuple[str, ...]


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file.

    A line is `question<TAB>["an answer", "another"]`, as in the `.qa.csv` files of Dense Passage
    Retrieval, or a JSON object with `question` and `answer` or `answers`, a text or a list.

    Args:
        path: File in UTF-8.

    Raises:
        DataError: The file cannot be read or is empty, or a line, which is named, is neither.
    """
    found = [_question(line, path, number) for number, line in _lines(path)]
    if not found:
        raise DataError(
            f"`{path}` has no questions",
            hint='write lines of `question<TAB>["answer", ...]`, or JSON lines with `question` and '
            "`answers`",
        )
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1):
                if text := line.decode().strip():
                    yield number, text
    except (OSError, UnicodeDecodeError) as error:
        hint = missing_path_hint(path, None)
        raise DataError(f"cannot read `{path}`", why=unreadable(error), hint=hint) from error


def _question(line: str, path: Path, number: int) -> Question:
    answers: Any = None
    if line.startswith("{"):
        try:
            values = json.loads(line)
            text, answers = values["question"], values.get("answers", values.get("answer"))
        except (ValueError, KeyError, RecursionError):
            text = ""
    else:
        text, _, listed = line.partition("\t")
        try:
            answers = ast.literal_eval(listed.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            answers = None
    answers = [answers] if isinstance(answers, str) else answers
    right = isinstance(answers, list | tuple) and all(isinstance(one, str) for one in answers)
    if not isinstance(text, str) or not text.strip() or not right or not answers:
        raise DataError(
            f"line {number} of `{path}` is no question with answers",
            why=f"it begins with `{line:.60}`",
            hint='write `question<TAB>["answer", ...]`, or JSON with `question` and `answers`',
        )
    return Question(text, tuple(answers))


def place_of_answer(answers: Sequence[str], texts: Sequence[str]) -> int | None:
    """Return the place, from 1, of the first text that contains an answer; None: none does."""
    found = (place for place, text in enumerate(texts, start=1) if contains(text, answers))
    return next(found, None)


def contains(text: str, answers: Sequence[str]) -> bool:
    """Return True if a text contains an answer, word by word, without regard to case.

    Source:
        Karpukhin et al. 2020 (https://arxiv.org/abs/2004.04906), the match of strings: both are
        decomposed (NFD) and divided into words and signs.
    """
    words = _words(text)
    for answer in answers:
        wanted = _words(answer)
        starts = range(len(words) - len(wanted) + 1)
        if wanted and any(words[at : at + len(wanted)] == wanted for at in starts):
            return True
    return False


def _words(text: str) -> list[str]:
    return [one.lower() for one in _TOKEN.findall(unicodedata.normalize("NFD", text))]


def summary(places: Sequence[int | None], tops: Sequence[int]) -> str:
    """Return the shares of questions answered at each K, with their standard errors."""
    count = len(places)
    parts = []
    for top in tops:
        share = sum(place is not None and place <= top for place in places) / count
        error = (share * (1 - share) / max(count - 1, 1)) ** 0.5
        parts.append(f"top {top}: {share:.1%} +- {error:.1%}")
    return f"{counted(count, 'question')}: {', '.join(parts)}"
