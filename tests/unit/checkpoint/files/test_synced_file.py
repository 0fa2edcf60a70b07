"""Tests of files that are checksummed while written and safe on the disk when closed."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from lmcore.checkpoint.files import synced_file
from lmcore.checkpoint.files.synced_file import SyncedFile, file_checksum


def test_size_and_checksum_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Size and checksum for the manifest match the file on the disk."""
    monkeypatch.setattr(synced_file, "_PIECE_BYTES", 1000)
    content = os.urandom(12_345)
    with SyncedFile(tmp_path / "file") as stream:
        stream.write(content[:7])
        stream.write(memoryview(content[7:]))
    assert (tmp_path / "file").read_bytes() == content
    assert stream.entry().size == stream.tell() == len(content)
    assert stream.entry().crc32 == zlib.crc32(content) == file_checksum(tmp_path / "file")


def test_existing_file_is_not_overwritten(tmp_path: Path):
    """A name that is taken is refused, not truncated."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        SyncedFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
