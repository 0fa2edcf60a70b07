"""Lock files: one owner at a time, a dead owner is replaced, a live one never."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmcore.base import lock as lock_module
from lmcore.base import threads
from lmcore.base.lock import LockFile, LockOwner


def owner(**changes: Any) -> str:
    """Return the content of the lock of this process, with *changes*."""
    return json.dumps(vars(LockOwner.this_process()) | changes)


def age(path: Path, seconds: float) -> None:
    """Set the time of the last touch of *path*."""
    os.utime(path, (time.time() - seconds,) * 2)


def left_in(folder: Path) -> list[str]:
    """Return the names of all files in *folder*."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_one_holds_it_and_the_other_is_told_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool
) -> None:
    """A held lock is not given again; a released one leaves nothing behind."""
    if not links:

        def refuse(*_: object) -> None:
            raise PermissionError(1, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    first, second = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    assert first.acquire()
    assert first.is_held()
    assert not second.acquire()
    assert str(second.owner()).startswith(f"process {os.getpid()} on ")
    second.release()
    assert left_in(tmp_path) == ["lock"], "only the owner's release removes it"
    first.release()
    assert left_in(tmp_path) == []
    assert second.acquire()
    second.release()


@pytest.mark.parametrize("how", ["gone", "zombie", "number given again"])
def test_a_dead_owner_on_this_machine_is_replaced_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A process that ended, reaped or not, or another process of its number, holds no lock."""
    path = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = lock_module.LockOwner.this_process().started
    if how == "zombie":
        import psutil

        child = psutil.Process(process.pid)
        started = child.create_time()
        process.kill()
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    else:
        process.kill()
        process.wait()
    changes = {"started": 1.0} if how == "number given again" else {"pid": process.pid}
    path.write_text(owner(**({"started": started} | changes)))
    assert LockFile(path, note="going on").acquire()
    process.communicate()
    assert "is gone; going on" in caplog.text
    assert left_in(tmp_path) == ["lock"]


@pytest.mark.parametrize("pid", ["-5", "0", "1e400", str(2**40), "null", '"x"'])
def test_an_owner_of_an_impossible_process_id(pid: str) -> None:
    """It is unreadable, not an error of the process that looks."""
    text = owner(pid=12345).replace("12345", pid)
    assert text != owner(pid=12345)
    assert LockOwner.parse(text.encode()) is None


@pytest.mark.parametrize("text", [None, "", "not json", '{"machine": 1}', "[" * 4000])
def test_an_owner_elsewhere_counts_while_its_lock_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """The lock of another machine or container, or without a readable owner, lives for a minute."""
    monkeypatch.setattr(lock_module, "_BEAT_SECONDS", 0.01)
    path = tmp_path / "lock"
    path.write_text(owner(machine="elsewhere", pid=2**30) if text is None else text)
    lock = LockFile(path)
    for seconds in (0, lock_module.SILENT_SECONDS - 5, -3600):
        age(path, seconds)
        assert not lock.acquire()
    age(path, lock_module.SILENT_SECONDS + 5)
    assert lock.acquire()
    assert "has been silent for 65 s" in caplog.text
    lock.release()
    assert left_in(tmp_path) == []


def test_an_owner_with_another_clock_is_seen_to_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock whose touches look old, but continue, is not taken over."""
    path = tmp_path / "lock"
    path.write_text(owner(machine="elsewhere"))
    age(path, 1000)

    class Clock:
        @staticmethod
        def sleep(_seconds: float) -> None:
            age(path, 990)

    monkeypatch.setattr(lock_module, "time", Clock)
    assert not LockFile(path).acquire()


def test_a_lock_is_touched_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is held, its time advances."""
    monkeypatch.setattr(lock_module, "_BEAT_SECONDS", 0.01)
    lock = LockFile(tmp_path / "lock")
    with lock.held() as acquired:
        assert acquired
        age(lock.path, 1000)
        end = time.monotonic() + 30
        while lock.path.stat().st_mtime < time.time() - 500:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert not lock.path.exists()


def test_a_lock_without_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A system without free threads does not keep the lock from being held."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with LockFile(tmp_path / "lock").held() as acquired:
        assert acquired
    assert "can't start new thread" in caplog.text
    assert left_in(tmp_path) == []


def test_a_lock_taken_over_is_not_removed_by_its_former_owner(tmp_path: Path) -> None:
    """A process that lost its lock notices, and leaves the new owner's alone."""
    lock = LockFile(tmp_path / "lock")
    assert lock.acquire()
    lock.path.unlink()
    lock.path.write_text(owner(machine="elsewhere"))
    assert not lock.is_held()
    lock.release()
    assert left_in(tmp_path) == ["lock"]


_TAKE = """
import sys
from pathlib import Path
from lmcore.base.lock import LockFile
lock = LockFile(Path(sys.argv[1]))
print("ready", flush=True)
input()
print(lock.acquire(), flush=True)
input()
"""


def test_one_of_several_takes_a_dead_owners_lock(tmp_path: Path) -> None:
    """Processes that see a dead owner at once do not all get its lock."""
    path = tmp_path / "lock"
    path.write_text(owner(started=1.0))
    others = [
        subprocess.Popen(
            [sys.executable, "-c", _TAKE, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(4)
    ]
    for word in ("ready", None):
        said = [process.stdout.readline().strip() for process in others if process.stdout]
        assert word is None or said == [word] * 4
        for process in others:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    for process in others:
        process.communicate()
    assert sorted(said) == ["False", "False", "False", "True"]


def test_an_optional_thread_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The work continues without it; a consequence that matters is a warning."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with (
        caplog.at_level(logging.WARNING),
        threads.periodically(print, 1.0, name="x", without="y is lost"),
    ):
        assert "y is lost" in caplog.text
    caplog.clear()
    assert not threads.start_optional(threading.Thread(target=print))
    assert not caplog.records


@pytest.mark.parametrize("refused", [False, True])
def test_work_in_threads(monkeypatch: pytest.MonkeyPatch, *, refused: bool) -> None:
    """Results come in order, the first error is raised, with threads or without."""
    if refused:

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
    assert threads.map_in_threads(lambda item: item * item, range(20), 4) == [
        item * item for item in range(20)
    ]
    assert threads.map_in_threads(str, [], 4) == []
    with pytest.raises(ZeroDivisionError):
        threads.map_in_threads(lambda item: 1 // item, [2, 0, 1], 2)


def test_a_copy_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that was copied with its lock does not belong to the owner of the original."""
    original = LockFile(tmp_path / "lock")
    assert original.acquire()
    shutil.copy(tmp_path / "lock", tmp_path / "copy")
    copy = LockFile(tmp_path / "copy")
    assert copy.acquire()
    assert "it is a copy of the lock of process" in caplog.text
    assert original.is_held()
    assert not LockFile(tmp_path / "lock").acquire()
    (tmp_path / "lock").rename(tmp_path / "renamed")
    assert not LockFile(tmp_path / "renamed").acquire(), "a renamed lock is the same lock"
    copy.release()
    assert not (tmp_path / "copy").exists()
    original.release()
