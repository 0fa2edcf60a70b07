"""Reading inputs: compression, patterns, damage."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import threading

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.data.source import open_text, read_batches, resolve_inputs
from lmcore.errors import DataError, MissingPackageError

TEXT = b"".join(b'{"text": "line %d"}\n' % i for i in range(5000))
HALF = len(TEXT) // 2


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


PACKERS = {"plain": bytes, "gz": gzip.compress, "xz": lzma.compress, "zst": zstd}


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("ending", [".jsonl", ".json.gz"])
def test_compression_is_told_by_content(tmp_path, kind, ending):
    """Every compression is read, whatever the file is called."""
    path = tmp_path / f"x{ending}"
    path.write_bytes(PACKERS[kind](TEXT))
    with open_text(str(path)) as stream:
        assert stream.read() == TEXT


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_many_members_are_read_to_the_end(tmp_path, kind):
    """Concatenated archives, as corpora are merged, give all their lines."""
    path = tmp_path / "x"
    path.write_bytes(PACKERS[kind](TEXT[:HALF]) + PACKERS[kind](b"") + PACKERS[kind](TEXT[HALF:]))
    with open_text(str(path)) as stream:
        assert b"".join(stream) == TEXT


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
@pytest.mark.parametrize("members", [1, 2])
def test_cut_archive_is_an_error(tmp_path, kind, members):
    """An archive that ends too early never passes for a shorter corpus."""
    path = tmp_path / "x"
    path.write_bytes((PACKERS[kind](TEXT) * members)[:-9])
    with pytest.raises(DataError, match="is cut short"), open_text(str(path)) as stream:
        stream.read()


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_altered_archive_is_an_error(tmp_path, kind):
    """An archive with altered bytes is an error that names the file."""
    packed = bytearray(PACKERS[kind](TEXT))
    middle = len(packed) // 2
    packed[middle : middle + 40] = bytes(40)
    path = tmp_path / "altered"
    path.write_bytes(packed)
    with pytest.raises(DataError, match="altered"), open_text(str(path)) as stream:
        stream.read()


def test_standard_input_may_be_compressed(monkeypatch):
    """`-` reads standard input, unpacked."""
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(gzip.compress(TEXT))))
    monkeypatch.setattr(sys, "stdin", stdin)
    with open_text("-") as stream:
        assert stream.read() == TEXT


def test_missing_zstandard_names_the_command(tmp_path, monkeypatch):
    """Without the package a `.zst` file is answered with what installs it."""
    (tmp_path / "x").write_bytes(zstd(TEXT))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with (
        pytest.raises(MissingPackageError, match="pip install zstandard"),
        open_text(str(tmp_path / "x")),
    ):
        pass


def test_other_binary_files_fail_as_lines_not_as_archives(tmp_path):
    """A compression that is not known is read as it is: its lines are then not UTF-8."""
    (tmp_path / "x.bz2").write_bytes(bz2.compress(TEXT))
    with open_text(str(tmp_path / "x.bz2")) as stream:
        assert stream.read(3) == b"BZh"


def test_patterns_are_sorted_and_order_is_kept(tmp_path):
    """Files come in the order given, a pattern's matches in the order of their names."""
    for name in ("b.jsonl", "a.jsonl", "c.txt", "[d].jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "e.jsonl").mkdir()
    given_names = [str(tmp_path / "c.txt"), str(tmp_path / "?.jsonl"), str(tmp_path / "[d].jsonl")]
    names = [path.rpartition("/")[2] for path in resolve_inputs(given_names)]
    assert names == ["c.txt", "a.jsonl", "b.jsonl", "[d].jsonl"]


@pytest.mark.parametrize(
    "name, message",
    [("none.jsonl", "no such file"), ("*.csv", "no file matches"), ("", "is a directory")],
)
def test_input_that_is_not_there_is_named(tmp_path, name, message):
    """A missing file, a pattern without a match and a directory are told apart."""
    with pytest.raises(DataError, match=message):
        resolve_inputs([str(tmp_path / name)])


@pytest.mark.parametrize("kind", PACKERS)
def test_a_pipe_is_read(tmp_path, kind):
    """A named pipe, such as a shell makes of `<(command)`, is an input like any file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(PACKERS[kind](TEXT),), daemon=True)
    writer.start()
    batches = list(read_batches(resolve_inputs([str(path)])))
    writer.join()
    assert b"".join(line for batch in batches for line in batch.lines) == TEXT


def test_no_input_is_an_error():
    """An empty list of inputs is an error."""
    with pytest.raises(DataError, match="no input"):
        resolve_inputs([])


@settings(deadline=None)
@given(
    lines=st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=40),
    last=st.booleans(),
    max_lines=st.integers(1, 10),
    max_bytes=st.integers(1, 60),
)
def test_batches_are_the_lines_in_order(tmp_path_factory, lines, last, max_lines, max_bytes):
    """Batches keep to their bounds and to one file; joined they are the files' bytes."""
    folder = tmp_path_factory.mktemp("lines")
    text = b"\n".join(lines) + (b"\n" if last else b"")
    text = b"x" + text  # no byte-order mark, no archive
    for name in ("1", "2"):
        (folder / name).write_bytes(text)
    files = [str(folder / "1"), str(folder / "2")]
    batches = list(read_batches(files, max_lines=max_lines, max_bytes=max_bytes))
    for file in files:
        own = [batch for batch in batches if batch.source == file]
        assert b"".join(line for batch in own for line in batch.lines) == text
        number = 1
        for batch in own:
            assert batch.first_line == number
            assert len(batch.lines) <= max_lines
            assert sum(map(len, batch.lines[:-1])) < max_bytes
            number += len(batch.lines)


def test_byte_order_mark_is_dropped(tmp_path):
    """A byte-order mark before the first line is no part of it."""
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbf{}\n\xef\xbb\xbf\n")
    (batch,) = read_batches([str(tmp_path / "x")])
    assert batch.lines == (b"{}\n", b"\xef\xbb\xbf\n")
