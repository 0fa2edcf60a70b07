"""The files that cleaning writes."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import zstandard

from lmcore.base.errors import ConfigError, DataError
from lmcore_data_tools.clean.line_writer import LineWriter


def unzstd(content: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(content)


@pytest.mark.parametrize(
    "name, unpack",
    [
        ("a.jsonl", bytes),
        ("a.jsonl.gz", gzip.decompress),
        ("a.json.zst", unzstd),
        ("a.xz", lzma.decompress),
        ("a.bz2", bz2.decompress),
    ],
)
def test_compressed_as_named(tmp_path: Path, name: str, unpack: Callable[[bytes], bytes]) -> None:
    """The ending chooses the compression; nothing is there before `commit`; bytes are repeated."""
    contents = []
    for folder in ("one", "two"):
        path = tmp_path / folder / name
        with closing(LineWriter(str(path))) as writer:
            writer.write([b"first", b""])
            writer.write([b"last"])
            writer.finish()
            assert not path.exists()
            writer.commit()
        assert [one.name for one in path.parent.iterdir()] == [name]
        contents.append(path.read_bytes())
        assert unpack(contents[-1]) == b"first\n\nlast\n"
        assert writer.bytes == 12
    assert contents[0] == contents[1]


def test_not_committed(tmp_path: Path) -> None:
    """A writer closed without `commit` leaves no file, and does not change an older one."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"old")
    with closing(LineWriter(str(path))) as writer:
        writer.write([b"x" * 100] * 1000)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.txt"])
def test_other_format(tmp_path: Path, name: str) -> None:
    """A name that promises another format is refused."""
    with pytest.raises(ConfigError, match="the output is JSON lines"):
        LineWriter(str(tmp_path / name))


def test_directory(tmp_path: Path) -> None:
    """A directory in place of a file is reported before any work is done."""
    with pytest.raises(ConfigError, match="is a directory"):
        LineWriter(str(tmp_path))


def test_directory_not_writable(tmp_path: Path) -> None:
    """A file where a directory should be is an error with its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        LineWriter(str(tmp_path / "file" / "out.jsonl"))
