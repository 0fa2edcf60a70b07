"""Tables: csv, tsv, headers, quotes, rows that do not fit."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data.input.csv_table import read as read_table
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions

FIELD = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=30)


@given(
    rows=st.lists(st.tuples(FIELD, FIELD), max_size=20),
    delimiter=st.sampled_from(",;\t|"),
    batch_bytes=st.integers(1, 100),
)
def test_written_tables_are_read_back(tmp_path_factory, rows, delimiter, batch_bytes):
    """Tables that the csv module wrote are read back, with quotes and line ends within fields."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([("id", "text"), *rows])
    path = tmp_path_factory.mktemp("table") / "x.csv"
    path.write_bytes(out.getvalue().encode())
    options = InputOptions(("text", "id"), delimiter=delimiter, batch_bytes=batch_bytes)
    batches = list(read_table(InputFile(str(path), "csv"), options))
    found = [row for batch in batches for row in zip(*batch.columns, strict=True)]
    assert found == [(text, name) for name, text in rows]


def test_numbers_are_those_of_lines(tmp_path, read):
    """A row is named by the line on which it begins, so that an editor finds it."""
    (tmp_path / "x.csv").write_text('text\n"a\nb"\n\nc\n')
    found = read(tmp_path / "x.csv")
    assert found.texts == ["a\nb", "c"]
    assert found.numbers[0] == 2


def test_tsv_has_no_quotes_by_default(tmp_path, read):
    """A quotation mark in a tsv, as GLUE's files have, opens nothing."""
    (tmp_path / "x.tsv").write_text('id\ttext\n1\t"He said.\n2\tYes."\n')
    assert read(tmp_path / "x.tsv").texts == ['"He said.', 'Yes."']
    (tmp_path / "y.tsv").write_text('id\ttext\n1\t"a\tb"\n')
    assert read(tmp_path / "y.tsv", quotes=True).texts == ["a\tb"]


def test_columns_are_numbered_without_header(tmp_path, read):
    """Without a header the first row is a document, and keys are numbers from 1."""
    (tmp_path / "x.csv").write_text("a,b\nc,d\n")
    assert read(tmp_path / "x.csv", header=False, keys=("2",)).texts == ["b", "d"]
    (problem,) = read(tmp_path / "x.csv", header=False, keys=("3",)).problems
    assert "there is no `3`; without a header its columns: `1`, `2`" in problem.detail


def test_missing_column_names_those_there_are(tmp_path, read):
    """A wrong key is an error of the file, with the nearest of its columns."""
    (tmp_path / "x.csv").write_text("id,texte\n1,a\n")
    (problem,) = read(tmp_path / "x.csv", skip=True).problems
    assert problem.where == f"`{tmp_path}/x.csv`"
    assert "its columns: `id`, `texte`" in problem.detail
    assert "did you mean `--json-keys texte`" in str(problem.error())


def test_wrong_delimiter_shows_in_the_columns(tmp_path, read):
    """A table with other delimiters shows its whole header as one column."""
    (tmp_path / "x.csv").write_text("id;text\n1;a\n")
    (problem,) = read(tmp_path / "x.csv").problems
    assert "its columns: `id;text`" in problem.detail
    assert "try `--delim ';'`" in str(problem.error())


def test_double_columns_are_refused(tmp_path, read):
    """Two columns of one name are not guessed between."""
    (tmp_path / "x.csv").write_text("text,text\na,b\n")
    (problem,) = read(tmp_path / "x.csv").problems
    assert "2 columns have the name `text`" in problem.detail


def test_rows_that_do_not_fit_are_problems(tmp_path, read):
    """A row with other fields than the header, or bytes that are no UTF-8, is named."""
    (tmp_path / "x.csv").write_bytes(b"id,text\n1,a\n2\n3,b,c\n4,caf\xe9\n5,d\n")
    found = read(tmp_path / "x.csv", skip=True)
    assert found.texts == ["a", "d"]
    wrong = "wrong number of fields"
    assert found.told == [(3, wrong), (4, wrong), (5, "not UTF-8")]
    assert "it has 1, the first row has 2" in found.problems[0].detail


def test_huge_field_is_read_up_to_the_bound(tmp_path, read):
    """The csv module's own bound of a field does not count, ours does."""
    (tmp_path / "x.csv").write_text("text\n" + "y" * 200_000 + "\nz\n")
    assert len(read(tmp_path / "x.csv").texts[0]) == 200_000
    found = read(tmp_path / "x.csv", max_document_bytes=100_000, skip=True)
    assert found.texts == ["z"]
    assert found.told == [(2, "too long")]


def test_quote_that_is_never_closed_is_bounded(tmp_path, read):
    """A stray quote does not swallow the table: its line is named, and reading continues."""
    (tmp_path / "x.csv").write_text('text\na\n"b\n' + "c\n" * 100)
    found = read(tmp_path / "x.csv", max_document_bytes=100, skip=True)
    assert found.texts[0] == "a"
    assert found.told == [(3, "too long")]
    assert "is a quote not closed?" in found.problems[0].detail
    assert set(found.texts[1:]) == {"c"}
    assert len(found.texts) > 40


@pytest.mark.parametrize("end", ['"b', '"b\n', '"b\n\n', 'x\n"', '"""\n'])
def test_quote_open_at_the_end_is_a_problem(tmp_path, read, end):
    """A table that was cut within quotes does not give half a field as a document."""
    (tmp_path / "x.csv").write_text("text\na\n" + end)
    found = read(tmp_path / "x.csv", skip=True)
    line = 4 if end.startswith("x") else 3
    assert found.texts == (["a", "x"] if line == 4 else ["a"])
    assert found.told == [(line, "quote not closed")]


@pytest.mark.parametrize("content", ["", "\n\n", "text\n"])
def test_empty_table_has_no_documents(tmp_path, read, content):
    """Nothing, blank lines and a lone header are no error here."""
    (tmp_path / "x.csv").write_text(content)
    assert read(tmp_path / "x.csv").batches == []
