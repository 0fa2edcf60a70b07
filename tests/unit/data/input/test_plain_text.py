"""Plain text by file, line and paragraph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.plain_text import read as read_plain

TEXT = "\ufeffOne.\r\nTwo.\n\n \nThree.\nFour.\n\n\n"


@pytest.mark.parametrize(
    "unit, texts, numbers",
    [
        ("file", [TEXT[1:]], [1]),
        ("line", ["One.", "Two.", " ", "Three.", "Four."], [1, 2, 4, 5, 6]),
        ("paragraph", ["One.\r\nTwo.", "Three.\nFour."], [1, 5]),
    ],
)
def test_units_of_a_text(tmp_path, read, unit, texts, numbers):
    """A document is the file as it is, a line without its end, or a paragraph."""
    (tmp_path / "x.txt").write_bytes(TEXT.encode())
    found = read(tmp_path / "x.txt", document_per=unit)
    assert found.texts == texts
    assert found.numbers == numbers


@given(
    paragraphs=st.lists(
        st.lists(
            st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1).filter(
                str.strip
            ),
            min_size=1,
            max_size=4,
        ),
        max_size=6,
    )
)
def test_paragraphs_are_put_back(tmp_path_factory, paragraphs):
    """Paragraphs that were joined by blank lines are found again, each as it was."""
    texts = ["\n".join(lines) for lines in paragraphs]
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_bytes("\n\n".join(texts).removeprefix("\ufeff").encode())
    options = InputOptions(document_per="paragraph")
    batches = list(read_plain(InputFile(str(path), "text"), options))
    found = [text for batch in batches for text in batch.columns[0]]
    assert found == [
        text.removeprefix("\ufeff") if i == 0 else text for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize("unit", ["line", "paragraph"])
@pytest.mark.parametrize("ending", ["\n", ""])
def test_long_lines_and_paragraphs_are_passed_over(tmp_path, read, unit, ending):
    """A line or paragraph that is too long is named by its first line; the others are read."""
    parts = ["a", "b" * 101, "c" * 100, "d"]
    joint = "\n" if unit == "line" else "\n\n"
    (tmp_path / "x.txt").write_text(joint.join(parts) + ending)
    found = read(tmp_path / "x.txt", document_per=unit, max_document_bytes=100, skip=True)
    assert found.texts == ["a", "c" * 100, "d"]
    assert found.told == [(2 if unit == "line" else 3, "too long")]


def test_long_paragraph_of_short_lines_is_too_long(tmp_path, read):
    """The bound applies to the paragraph, not to its lines."""
    (tmp_path / "x.txt").write_text("y\n" * 100 + "\nend\n")
    found = read(tmp_path / "x.txt", document_per="paragraph", max_document_bytes=100, skip=True)
    assert found.texts == ["end"]
    assert found.told == [(1, "too long")]


def test_long_file_names_the_flags(tmp_path, read):
    """A file that is too long for one document names the way out."""
    (tmp_path / "x.txt").write_text("y" * 101)
    (problem,) = read(tmp_path / "x.txt", max_document_bytes=100, batch_bytes=10).problems
    assert "--document-per paragraph" in str(problem.error())
    assert "--max-document-mib" in str(problem.error())


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_text_that_is_no_utf8_is_named(tmp_path, read, unit):
    """A byte that is no UTF-8 is a problem with its place."""
    (tmp_path / "x.txt").write_bytes(b"caf\xe9\n")
    (problem,) = read(tmp_path / "x.txt", document_per=unit).problems
    assert problem.reason == "not UTF-8"
    assert "0xe9" in problem.detail


def test_plain_text_has_one_key(tmp_path, read):
    """Another key than `text` is an error of the file."""
    (tmp_path / "x.txt").write_text("a")
    (problem,) = read(tmp_path / "x.txt", keys=("body",)).problems
    assert "there is no `body`; plain text has the key: `text`" in str(problem.error())
