"""Parquet and Arrow: columns, types, damage, memory."""

from __future__ import annotations

import io
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import feather

from lmcore.base.errors import DataError, MissingPackageError

TEXTS = ["", "a", "Grüße 😀\n", "x" * 5000] * 50


def _stream(table, path):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def _file(table, path, compression="lz4"):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, table.schema, options=options) as writer,
    ):
        writer.write_table(table, max_chunksize=7)


def _packed_stream(table, path):
    _stream(table, path)
    path.write_bytes(zstandard.ZstdCompressor().compress(path.read_bytes()))


WRITERS = {
    "x.parquet": lambda table, path: pq.write_table(table, path, row_group_size=33),
    "plain.parquet": lambda table, path: pq.write_table(
        table, path, compression="none", use_dictionary=False
    ),
    "x.arrow": _file,
    "plain.arrow": lambda table, path: _file(table, path, None),
    "stream.arrow": _stream,
    "stream.arrow.zst": _packed_stream,
    "x.feather": lambda table, path: feather.write_feather(table, str(path)),
}
KINDS = {
    "string": lambda texts: pa.array(texts, pa.string()),
    "large": lambda texts: pa.array(texts, pa.large_string()),
    "dictionary": lambda texts: pa.array(texts, pa.string()).dictionary_encode(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITERS)
def test_columns_of_text_are_read(tmp_path, read, name, kind):
    """Every kind of text column gives its texts, whatever else the file holds."""
    other = pa.array([{"n": i} for i in range(len(TEXTS))])
    table = pa.table({"meta": other, "text": KINDS[kind](TEXTS), "title": ["t"] * len(TEXTS)})
    WRITERS[name](table, tmp_path / name)
    found = read(tmp_path / name, keys=("title", "text"), batch_bytes=999)
    assert found.rows == [("t", text) for text in TEXTS]
    assert found.numbers == [*range(1, len(TEXTS) + 1)]
    assert not found.problems


@pytest.mark.parametrize("name", WRITERS)
def test_nulls_and_long_texts_are_problems(tmp_path, read, name):
    """A null and a text over the bound are named by their row."""
    table = pa.table({"text": ["a", None, "b" * 101, "c"]})
    WRITERS[name](table, tmp_path / name)
    found = read(tmp_path / name, max_document_bytes=100, skip=True)
    assert found.texts == ["a", "c"]
    assert found.told == [(2, "not a string"), (3, "too long")]
    assert f"`{tmp_path}/{name}` row 2: not a string" in str(found.problems[0].error())


@pytest.mark.parametrize("name", WRITERS)
def test_text_that_is_no_utf8_is_one_rows_problem(tmp_path, read, name):
    """Neither format checks its texts; we do, a row at a time."""
    bad = pa.array([b"a", b"caf\xe9", b"c"]).view(pa.string())
    WRITERS[name](pa.table({"text": bad}), tmp_path / name)
    found = read(tmp_path / name, skip=True)
    assert found.texts == ["a", "c"]
    assert found.told == [(2, "not UTF-8")]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_wrong_columns_are_named(tmp_path, read, name):
    """A missing column names those there are; one of numbers says what it holds."""
    WRITERS[name](pa.table({"content": ["a"], "id": [1]}), tmp_path / name)
    (problem,) = read(tmp_path / name, keys=("contents",)).problems
    assert "did you mean `--json-keys content`?" in str(problem.error())
    (problem,) = read(tmp_path / name, keys=("id",)).problems
    assert "the column `id` has the type int64" in problem.detail


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "stream.arrow"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_cut_files_are_errors(tmp_path, read, name, share):
    """A file that was cut never passes for a shorter one; skipping counts it."""
    path = tmp_path / name
    WRITERS[name](pa.table({"text": [str(i) * 50 for i in range(900)]}), path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(DataError, match=r"cut short|damaged"):
        read(path)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "plain.arrow", "stream.arrow"])
@pytest.mark.parametrize("seed", range(25))
def test_altered_files_end_in_an_error_or_in_texts(tmp_path, read, name, seed):
    """Altered bytes are answered with an error, a problem or other text, never with a crash."""
    path = tmp_path / name
    WRITERS[name](pa.table({"text": [str(i) * 9 for i in range(99)]}), path)
    content = bytearray(path.read_bytes())
    start = seed * len(content) // 25
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(content)
    try:
        found = read(path, skip=False)
    except DataError as error:
        assert name in error.what  # noqa: PT017  # it may also be read
    else:
        assert all(isinstance(text, str) for text in found.texts)


def test_other_formats_are_distinguished(tmp_path, read):
    """A name that promises Parquet over other bytes, and Feather's first version, are named."""
    (tmp_path / "x.parquet").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(DataError, match="is not a Parquet file"):
        read(tmp_path / "x.parquet")
    (tmp_path / "x.feather").write_bytes(b"FEA1" + bytes(40))
    with pytest.raises(DataError, match="version 1 of Feather"):
        read(tmp_path / "x.feather")
    (tmp_path / "x.arrow").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(DataError, match="is damaged"):
        read(tmp_path / "x.arrow")


def test_parquet_from_a_pipe_says_why_not(read):
    """Parquet cannot be read from standard input: its description is at the end."""
    with pytest.raises(DataError, match="cannot be read from a pipe"):
        read("-", "parquet")


def test_arrow_stream_from_a_pipe(tmp_path, read, monkeypatch):
    """An Arrow stream is read from standard input."""
    _stream(pa.table({"text": ["a", "b"]}), tmp_path / "x")
    raw = io.BufferedReader(io.BytesIO((tmp_path / "x").read_bytes()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    assert read("-", "arrow").texts == ["a", "b"]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_missing_package_names_the_command(tmp_path, read, monkeypatch, name):
    """Without pyarrow the answer is what installs it."""
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match="pip install pyarrow"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["x.parquet", "plain.arrow", "stream.arrow"])
def test_position_rises_to_the_size_of_the_file(tmp_path, read, name):
    """The position in the file is known, for the progress bar."""
    path = tmp_path / name
    WRITERS[name](pa.table({"text": TEXTS * 5}), path)
    positions = [batch.position for batch in read(path, batch_bytes=10_000).batches]
    assert positions == sorted(positions)
    assert positions[-1] > path.stat().st_size * 0.8
