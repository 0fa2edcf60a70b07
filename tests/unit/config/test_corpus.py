"""Names and paths among the values of `--train-data` and its like."""

from __future__ import annotations

import pytest

from lmcore.config.corpus import (
    COMPRESSED,
    TEXT_ENDINGS,
    is_text_path,
    named_path,
)
from lmcore.data.input.files import ending_of, find_inputs


@pytest.mark.parametrize(
    "word", ["/c4/en", "./c4", "../x", "c4/*", "c4/[ab]", "a.jsonl", "a.JSON.gz", "x.gz", "t.txt"]
)
def test_paths(word: str) -> None:
    """A path begins as one, has a wildcard, or ends as a file of text does."""
    assert is_text_path(word)


@pytest.mark.parametrize("word", ["c4/en", "shakespeare", "wiki.2023", "a_b-c", "c4/en/3.0.1"])
def test_names(word: str) -> None:
    """Anything else is a name, whatever lies in the working directory."""
    assert not is_text_path(word)


def test_endings_of_a_preparation(tmp_path) -> None:
    """A preparation finds files with these endings in a directory."""
    for ending in TEXT_ENDINGS:
        (tmp_path / f"x{ending}").write_text("")
    found = find_inputs([str(tmp_path)], by_name=True)
    assert sorted(ending_of(file.path) for file in found) == sorted(TEXT_ENDINGS)
    assert all(ending_of(f"x.jsonl{ending}") == ".jsonl" for ending in COMPRESSED)


@pytest.mark.parametrize(
    "word, expected",
    [
        ("web", None),
        ("web=data/web", ("web", "data/web")),
        (" web = x.jsonl ", ("web", "x.jsonl")),
        ("/run=3/x.jsonl", None),
        ("x/y=z", ("x/y", "z")),
    ],
)
def test_named_paths(word: str, expected: object) -> None:
    """A path may have the character that separates a name from a path."""
    assert named_path(word) == expected
