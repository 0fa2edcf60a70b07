"""Files of questions, and texts that answer them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import DataError
from lmcore.retrieval.answers import Question, contains, place_of_answer, read_questions, summary


def test_both_formats(tmp_path: Path) -> None:
    """Lines of Dense Passage Retrieval and JSON lines are read; empty lines are left out."""
    path = tmp_path / "questions"
    path.write_text(
        "who wrote it\t['Goethe', \"J. W. Goethe\"]\n\n"
        '{"question": "when", "answer": ["1808", "in 1808"]}\n'
        '{"question": "where", "answers": "Weimar"}\n'
    )
    assert read_questions(path) == [
        Question("who wrote it", ("Goethe", "J. W. Goethe")),
        Question("when", ("1808", "in 1808")),
        Question("where", ("Weimar",)),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "no tab",
        "a question\t__import__('os').getcwd()",
        "a question\t[]",
        "a question\t[1]",
        "\t['a']",
        '{"question": 1, "answer": "a"}',
        '{"question": "a"}',
        '{"question": "a", "answer": [',
    ],
)
def test_a_line_that_is_none(tmp_path: Path, line: str) -> None:
    """It is named by its number."""
    path = tmp_path / "questions"
    path.write_text(f"a\t['b']\n{line}\n")
    with pytest.raises(DataError, match="line 2"):
        read_questions(path)


def test_files_without_questions(tmp_path: Path) -> None:
    """An empty file, no file and bytes that are no text are errors."""
    path = tmp_path / "questions"
    with pytest.raises(DataError, match="cannot read"):
        read_questions(path)
    path.write_bytes(b"\n")
    with pytest.raises(DataError, match="no questions"):
        read_questions(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match="cannot read"):
        read_questions(path)


def test_answers_in_texts() -> None:
    """Whole words count, without case; accents that are decomposed are the same."""
    assert contains("Faust was written by GOETHE.", ["Schiller", "goethe"])
    assert not contains("Goethestadt", ["Goethe"])
    assert contains("cafe\u0301 au lait", ["caf\u00e9"])
    assert contains("the U.S. navy", ["u.s."])
    assert not contains("anything", [""])
    assert not contains("north of york", ["new york"])
    assert place_of_answer(["b"], ["a", "c b", "b"]) == 2
    assert place_of_answer(["d"], ["a", "c b", "b"]) is None


def test_summary() -> None:
    """The share at each K, by hand: 1 of 4, 2 of 4 and 3 of 4."""
    assert summary([1, None, 5, 20], (1, 5, 20)) == (
        "4 questions: top 1: 25.0% +- 25.0%, top 5: 50.0% +- 28.9%, top 20: 75.0% +- 25.0%"
    )
