"""Data file lists: lines of two and three columns, and invalid lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data.blend.file_list import (
    DataFile,
    corpus_of,
    format_data_file_list,
    parse_data_file_list,
    read_data_file_list,
)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("0.25 /d/c4-00_text_document c4", DataFile(0.25, "/d/c4-00_text_document", "c4")),
        ("0.25 /d/c4-00_text_document.bin c4", DataFile(0.25, "/d/c4-00_text_document", "c4")),
        ("1\t/d-1/c4-00_text_document.idx", DataFile(1.0, "/d-1/c4-00_text_document", "c4")),
        (
            "  3e-2   wiki_text_document  ",
            DataFile(0.03, "wiki_text_document", "wiki_text_document"),
        ),
        ("1 c4-00 other-name", DataFile(1.0, "c4-00", "other-name")),
    ],
)
def test_line(line: str, expected: DataFile) -> None:
    """Both kinds of line are read; an ending is taken off, the name gives a missing corpus."""
    assert parse_data_file_list(line, source="x") == ((expected,), [])


def test_comments_and_blank_lines(tmp_path: Path) -> None:
    """They are skipped, with a byte-order mark and carriage returns; order is kept."""
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbf# shares\r\n\r\n2 b\r\n1 a x\r\n")
    files, problems = read_data_file_list(path)
    assert files == (DataFile(2.0, "b", "b"), DataFile(1.0, "a", "x"))
    assert not problems


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "names no data"),
        ("# nothing\n", "names no data"),
        ("1 a\n2\n", "`list` line 2 has 1 column"),
        ("1 a b c", "has 4 columns"),
        ("a 1", "the weight comes before the path"),
        ("a b", "`a` is not a weight"),
        ("0 a", "`0` is not above 0"),
        ("-1 a", "`-1` is not above 0"),
        ("nan a", "`nan` is not above 0"),
        ("inf a", "`inf` is not above 0"),
        ("1e308 a", "`1e308` is too large"),
    ],
)
def test_invalid_lines(text: str, message: str) -> None:
    """A line of another shape, or without a weight above 0, is reported by its number."""
    _, (problem,) = parse_data_file_list(text, source="list")
    assert message in problem.render()


def test_all_invalid_lines() -> None:
    """The problems are reported together, at most 20 of them."""
    _, problems = parse_data_file_list("1\n1 a\n0 b\n" + "x y\n" * 30, source="list")
    messages = [problem.what for problem in problems]
    assert messages[:3] == [
        "`list` line 1 has 1 column",
        "`list` line 3: the weight `0` is not above 0",
        "`list` line 4: `x` is not a weight",
    ]
    assert messages[20:] == ["`list`: 12 more lines are invalid"]


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing, binary or enormous file is an error that names it."""
    with pytest.raises(DataError, match="cannot read"):
        read_data_file_list(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_data_file_list(tmp_path / "binary")
    with (tmp_path / "large").open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(DataError, match="larger than 64 MiB"):
        read_data_file_list(tmp_path / "large")


@given(
    st.lists(
        st.tuples(
            st.floats(min_value=1e-300, max_value=1e300),
            st.from_regex(r"[a-z/][a-z0-9_/.]{0,9}x", fullmatch=True),
            st.from_regex(r"[a-z][a-z/]{0,5}", fullmatch=True),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_round_trip(rows: list[tuple[float, str, str]]) -> None:
    """A list that was written is read back, weights to their last digit."""
    files = tuple(DataFile(*row) for row in rows)
    assert parse_data_file_list(format_data_file_list(files), source="x") == (files, [])


def test_white_space_cannot_be_written() -> None:
    """A path with a space is refused, not written as two columns."""
    with pytest.raises(DataError, match="separated by white space"):
        format_data_file_list([DataFile(1.0, "my data", "c4")])


def test_corpus_of() -> None:
    """The corpus is the file's name up to the first hyphen, whatever the directory is called."""
    assert corpus_of("/big-disk/arxiv-0001_text_document") == "arxiv"
    assert corpus_of("books") == "books"
