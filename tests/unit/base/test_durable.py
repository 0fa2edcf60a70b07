"""Tests of files and directories that are complete or absent."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcore.base.durable import (
    AtomicFile,
    atomic_directory,
    hidden_path,
    is_abandoned,
    is_device,
    process_token,
    write_atomically,
)


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failed_write_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A replacement that fails leaves the old content and no temporary file."""
    write_atomically(tmp_path / "file", b"old")
    monkeypatch.setattr(Path, "replace", _refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_file_appears_with_commit(tmp_path: Path):
    """Until `commit` the old content is read; an uncommitted file is removed."""
    path = tmp_path / "file"
    write_atomically(path, b"old")
    file = AtomicFile(path)
    file.stream.write(b"new")
    file.finish()
    assert path.read_bytes() == b"old"
    file.commit()
    file.close()
    assert path.read_bytes() == b"new"
    AtomicFile(path).close()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


def test_content_is_synced_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The content is on the disk before the rename, and the name after it."""
    calls: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda _descriptor: calls.append("sync"))
    monkeypatch.setattr(
        Path, "replace", lambda path, target: (calls.append("rename"), replace(path, target))
    )
    write_atomically(tmp_path / "file", b"new")
    assert calls == ["sync", "rename", "sync"]


def test_directory_is_complete_or_absent(tmp_path: Path):
    """A block that fails leaves nothing; one that ends well leaves all its files."""
    path = tmp_path / "directory"
    writing = atomic_directory(path)
    (writing.__enter__() / "file").write_text("half")
    assert writing.__exit__(ValueError, ValueError(), None) is not True
    assert not list(tmp_path.iterdir())
    with atomic_directory(path) as temporary:
        (temporary / "a").mkdir()
        (temporary / "a/file").write_text("whole")
    assert [entry.name for entry in tmp_path.iterdir()] == ["directory"]
    assert (path / "a/file").read_text() == "whole"


def test_directory_in_use_is_replaced_on_request_only(tmp_path: Path):
    """A directory with files stays, unless the caller says that it may go."""
    path = tmp_path / "directory"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(OSError, match="not empty"), atomic_directory(path):
        pass
    assert [entry.name for entry in path.iterdir()] == ["old"]
    with atomic_directory(path, replace=True) as temporary:
        (temporary / "new").touch()
    assert [entry.name for entry in path.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["directory"]


def test_leftover_of_an_earlier_process_is_overwritten(tmp_path: Path):
    """A process number that comes again does not trip over what a crash left."""
    left = AtomicFile(tmp_path / "file")
    left.stream.write(b"a long rest of a process that was killed")
    left.stream.close()
    write_atomically(tmp_path / "file", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


def test_hidden_names_of_processes(tmp_path: Path):
    """They differ even if process ids are equal, and only an ended process abandons its name."""
    place, pid, _ = process_token().split("-")
    assert pid == str(os.getpid())
    assert hidden_path(tmp_path / "a") == hidden_path(tmp_path / "a")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = tmp_path / f".a.tmp-{place}-{child.pid}-00000000"
    path.touch()
    assert not is_abandoned(path)
    child.kill()
    child.communicate()
    assert is_abandoned(path)
    other = tmp_path / f".a.tmp-00000000-{child.pid}-00000000"
    other.touch()
    assert not is_abandoned(other)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_files_of_a_zombie_are_abandoned(tmp_path: Path) -> None:
    """A process that ended counts as ended before its parent collects it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    place, _, digits = process_token().split("-")
    path = tmp_path / f".file.tmp-{place}-{process.pid}-{digits}"
    try:
        assert not is_abandoned(path)
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert is_abandoned(path)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("through_link", [False, True])
def test_a_pipe_is_written_and_not_replaced(tmp_path: Path, through_link: bool) -> None:
    """A device has the same path in code; only an administrator can make one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = pipe
    if through_link:
        path = tmp_path / "link"
        path.symlink_to(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    write_atomically(path, b"content")
    assert reader.communicate(timeout=60)[0] == b"content"
    assert pipe.is_fifo()
    assert {one.name for one in tmp_path.iterdir()} == {"pipe", path.name}


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs Linux's /dev/full")
def test_a_device_that_is_full() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_atomically(Path("/dev/full"), b"content")
    assert Path("/dev/full").is_char_device()


def test_names_of_open_files_are_devices(tmp_path: Path) -> None:
    """`/dev/stdout` that leads to a file is the file's open end, not its name."""
    code = "from pathlib import Path; from lmcore.base.durable import is_device, write_atomically\n"
    code += "write_atomically(Path('/dev/stdout'), b'content'); assert is_device(Path('/dev/null'))"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_bytes() == b"content"
    assert not is_device(tmp_path / "out")
    assert not is_device(tmp_path)
    assert not is_device(tmp_path / "absent")
