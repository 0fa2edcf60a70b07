"""Tests of files that are checksummed while written, directly or through the page cache."""

from __future__ import annotations

import errno
import os
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from suite.memory import huge_page_bytes

from lmcore.checkpoint.files import synced_file
from lmcore.checkpoint.files.synced_file import (
    BLOCK_BYTES,
    WRITER_NAME,
    SyncedFile,
    file_checksum,
    new_block,
)


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


CONTENT = os.urandom(1024) * (2 * BLOCK_BYTES // 1024) + b"and a rest"


def saved(path: Path) -> SyncedFile:
    with SyncedFile(path) as stream:
        stream.write(CONTENT[:1000])
        stream.write(memoryview(CONTENT)[1000:])
    return stream


def is_right(stream: SyncedFile) -> bool:
    return (
        stream.path.read_bytes() == CONTENT
        and stream.entry().size == len(CONTENT)
        and stream.entry().crc32 == file_checksum(stream.path)
    )


def test_blocks_and_a_rest(tmp_path: Path):
    """Two whole blocks, which are written while the next is filled, and a rest."""
    assert is_right(saved(tmp_path / "file"))


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Blocks go through the page cache, and are synced meanwhile."""
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(synced_file, "_set_direct", lambda _descriptor, *, direct: False)
    monkeypatch.setattr(synced_file, "_SYNC_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(synced_file.os, "fsync", lambda one: synced.append(one) or fsync(one))
    assert is_right(saved(tmp_path / "file"))
    assert len(synced) == 3


def test_a_file_system_that_refuses_a_direct_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file system that takes the flag and no such write: the cache takes what is left."""
    write, refused = os.write, []

    def refuse_first(descriptor: int, content: memoryview) -> int:
        if len(refused) == 1:  # as after a block of which a part was written
            refused.append(2)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not refused:
            refused.append(1)
            return write(descriptor, content[: BLOCK_BYTES // 2])
        return write(descriptor, content)

    monkeypatch.setattr(synced_file, "_set_direct", lambda _descriptor, *, direct: True)
    monkeypatch.setattr(synced_file.os, "write", refuse_first)
    assert is_right(saved(tmp_path / "file"))
    assert refused == [1, 2]


def test_no_thread_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without another thread the caller writes the blocks."""
    monkeypatch.setattr(synced_file, "start_optional", lambda _thread: False)
    assert is_right(saved(tmp_path / "file"))


def test_late_failure_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A write that fails after the last call of `write` fails `close`, and nothing follows it."""
    proceed, written = threading.Event(), []

    def fail(_descriptor: int, content: memoryview) -> int:
        assert threading.current_thread().name == WRITER_NAME
        assert proceed.wait(timeout=30)
        written.append(len(content))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(synced_file.os, "write", fail)
    stream = SyncedFile(tmp_path / "file")
    stream.write(CONTENT[:BLOCK_BYTES])
    assert stream.error is None
    proceed.set()
    with pytest.raises(OSError, match="Input/output error"):
        stream.close()
    assert written == [BLOCK_BYTES]
    assert stream._file.closed


def test_blocks_after_a_failure_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk that is full at the first block gets no second one."""
    calls = []

    def full(_descriptor: int, content: memoryview) -> int:
        calls.append(len(content))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(synced_file.os, "write", full)
    stream = SyncedFile(tmp_path / "file")
    for _ in range(4):
        stream.write(CONTENT[:BLOCK_BYTES])
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    assert calls == [BLOCK_BYTES]


def test_writes_pass_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The flag is set while blocks are written, where the file system can, and cleared then."""
    fcntl = pytest.importorskip("fcntl")
    flags = []
    write = os.write

    def seen(descriptor: int, content: memoryview) -> int:
        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return write(descriptor, content)

    monkeypatch.setattr(synced_file.os, "write", seen)
    probe = os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY)
    can = synced_file._set_direct(probe, direct=True)
    os.close(probe)
    if not can:
        pytest.skip("this file system has no direct writes")
    assert is_right(saved(tmp_path / "file"))
    assert flags[:2] == [os.O_DIRECT] * 2
    assert synced_file.BLOCK_BYTES == BLOCK_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such pages")
def test_blocks_of_huge_pages():
    """A block is aligned to huge pages, which are asked for."""
    before = huge_page_bytes()
    blocks = [new_block() for _ in range(3)]
    assert {len(block) for block in blocks} == {BLOCK_BYTES}
    assert {np.frombuffer(block, np.uint8).ctypes.data % 2**21 for block in blocks} == {0}
    assert huge_page_bytes() - before == 3 * BLOCK_BYTES
    for block in blocks:
        block[-1:] = b"x"
