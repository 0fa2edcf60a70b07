"""JSON lines: blocks, numbers of lines, lines that are too long."""

from __future__ import annotations

import io
import os
import re
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data.input.batch import LineBatch
from lmcore.data.input.files import InputFile, find_inputs
from lmcore.data.input.json_lines import read
from lmcore.data.input.options import InputOptions
from lmcore.data.input.read import read_input


def lines_of(path, **options):
    return list(read(InputFile(str(path), "jsonl"), InputOptions(**options)))


@given(
    lines=st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=40),
    last=st.booleans(),
    batch_bytes=st.integers(3, 60),
)
def test_batches_are_the_lines_in_order(tmp_path_factory, lines, last, batch_bytes):
    """Batches keep to one file and to whole lines; joined they are the files' bytes."""
    folder = tmp_path_factory.mktemp("lines")
    text = b"x" + b"\n".join(lines) + (b"\n" if last else b"")
    for name in ("1.jsonl", "2.jsonl"):
        (folder / name).write_bytes(text)
    files = find_inputs([str(folder)])
    batches = list(read_input(files, InputOptions(batch_bytes=batch_bytes)))
    for file in files:
        own = [batch for batch in batches if batch.source == file.path]
        assert b"".join(batch.block for batch in own) == text
        number = 1
        for batch in own:
            assert batch.first_line == number
            assert batch.lines == tuple(re.findall(rb"[^\n]*\n|[^\n]+", batch.block))
            assert len(batch.lines) == batch.num_lines
            assert b"".join(batch.lines) == batch.block
            number += batch.num_lines
        assert all(batch.block.endswith(b"\n") for batch in own[:-1])


def test_byte_order_mark_is_dropped(tmp_path):
    """A byte-order mark before the first line is no part of it; a later one stays."""
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbf{}\n\xef\xbb\xbf\n")
    (batch,) = lines_of(tmp_path / "x")
    assert batch.lines == (b"{}\n", b"\xef\xbb\xbf\n")


@pytest.mark.parametrize("batch_bytes", [7, 64, 1 << 20])
@pytest.mark.parametrize("ending", [b"\n", b""])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_line_that_is_too_long_is_named_and_passed_over(tmp_path, batch_bytes, ending, at):
    """Every line but the long one comes, with its own number."""
    lines = [b"first", b"second", b"third"]
    lines[at] = b"y" * 101
    (tmp_path / "x").write_bytes(b"\n".join(lines) + ending)
    batches = lines_of(tmp_path / "x", max_document_bytes=100, batch_bytes=batch_bytes, skip=True)
    found = {
        batch.first_line + i: line.strip()
        for batch in batches
        for i, line in enumerate(batch.lines)
    }
    assert found == {i + 1: line for i, line in enumerate(lines) if i != at}
    (problem,) = (problem for batch in batches for problem in batch.problems)
    assert (problem.line, problem.reason) == (at + 1, "too long")
    assert f"`{tmp_path}/x` line {at + 1}: too long" in str(problem.error())


def test_line_of_just_the_bound_is_read(tmp_path):
    """The line end does not count."""
    (tmp_path / "x").write_bytes(b"y" * 100 + b"\n" + b"z" * 100)
    batches = lines_of(tmp_path / "x", max_document_bytes=100, batch_bytes=7)
    assert [line for batch in batches for line in batch.lines] == [
        b"y" * 100 + b"\n",
        b"z" * 100,
    ]


def test_first_long_line_ends_the_reading_unless_skipped(tmp_path):
    """Nothing after a long line is read when it ends the run."""
    (tmp_path / "x").write_bytes(b"y" * 101 + b"\nnext\n")
    (batch,) = lines_of(tmp_path / "x", max_document_bytes=100, batch_bytes=7)
    assert batch.problems
    assert not batch.block


@pytest.mark.parametrize("start", [b"PAR1", b"ARROW1\0\0"])
def test_columns_are_distinguished_from_lines(tmp_path, monkeypatch, start):
    """Parquet or Arrow from standard input, or under a name of JSON lines, is named as such."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(start + b"\x15\x04\x15\n" * 9)
    with pytest.raises(DataError, match="is not JSON lines") as caught:
        lines_of(path, skip=True)
    assert caught.value.hint in {"add `--input-format parquet`", "add `--input-format arrow`"}
    with path.open("rb") as raw:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
        with pytest.raises(DataError, match="`-` is not JSON lines") as caught:
            lines_of("-")
    assert caught.value.hint == "write it to a file first"


def test_a_pipe_is_read(tmp_path):
    """A named pipe, such as a shell makes of `<(command)`, is an input like any file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    text = b'{"text": "a"}\n' * 9999
    writer = threading.Thread(target=path.write_bytes, args=(text,), daemon=True)
    writer.start()
    batches = list(read_input(find_inputs([str(path)]), InputOptions()))
    writer.join()
    assert all(isinstance(batch, LineBatch) for batch in batches)
    assert b"".join(batch.block for batch in batches) == text
