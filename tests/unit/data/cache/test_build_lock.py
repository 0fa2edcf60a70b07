"""Processes that wait for one of them to build, and what happens when that one dies."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from lmcore.base.errors import DataError
from lmcore.base.lock import LockOwner
from lmcore.data.cache import build_lock
from lmcore.data.cache.build_lock import build_or_wait


def owner(**changes) -> str:
    """Content of the lock file of a live builder on this machine."""
    return json.dumps(vars(LockOwner.this_process()) | changes)


class Clock:
    """Replacement of `time` in `build_lock`: a sleep only advances it, and calls *does*."""

    def __init__(self, monkeypatch, does=lambda now: None):
        self.now, self._does = 0.0, does
        monkeypatch.setattr(build_lock, "time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self._does(self.now)


def find_in(path):
    return lambda: path.read_text() if path.exists() else None


def wait(tmp_path, **changes):
    target = tmp_path / "made"
    arguments = {"what": "the thing", "patience": 5.0, **changes}
    return build_or_wait(
        tmp_path / "lock", find_in(target), lambda: target.write_text("built"), **arguments
    )


def test_who_comes_first_builds_and_leaves_no_lock(tmp_path):
    """With nobody else around the thing is built, and the lock is gone."""
    assert wait(tmp_path) == "built"
    assert not (tmp_path / "lock").exists()


def test_a_failed_build_frees_the_lock(tmp_path):
    """The builder's error reaches its caller, and the next process may try."""

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        build_or_wait(tmp_path / "lock", lambda: None, fail, what="x")
    assert wait(tmp_path) == "built"


@pytest.mark.parametrize("name", ["acquire", "release"])
def test_an_interrupt_leaves_no_lock(tmp_path, monkeypatch, name):
    """Ctrl-C while the lock is taken or released counts afterwards."""
    real = getattr(build_lock.LockFile, name)

    def interrupted(lock):
        if name == "release":
            os.kill(os.getpid(), signal.SIGINT)
        result = real(lock)
        if name == "acquire":
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(build_lock.LockFile, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_who_waits_takes_what_a_live_builder_makes(tmp_path, monkeypatch, caplog):
    """While the lock's owner lives nobody else builds; the wait is logged after a second."""
    (tmp_path / "lock").write_text(owner())
    Clock(monkeypatch, lambda now: now > 1.3 and (tmp_path / "made").write_text("theirs"))
    with caplog.at_level(logging.INFO):
        assert wait(tmp_path, patience=0.1) == "theirs"
    assert f"waiting for the thing, built by process {os.getpid()}" in caplog.text


def test_a_dead_builder_on_this_machine_is_noticed_at_once(tmp_path, monkeypatch, caplog):
    """A process that is no more does not hold up the build; see `tests/unit/base/test_lock.py`."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / "lock").write_text(owner(pid=process.pid))
    clock = Clock(monkeypatch)
    assert wait(tmp_path) == "built"
    assert clock.now < 0.1
    assert "is gone; starting the build again" in caplog.text


def test_patience_ends_without_a_result(tmp_path):
    """A build whose result no process finds is an error in the end, and leaves no lock."""
    with pytest.raises(DataError, match="the thing has not appeared") as caught:
        build_or_wait(tmp_path / "lock", lambda: None, lambda: None, what="the thing", patience=0.2)
    assert str(tmp_path / "lock") in caught.value.why
    assert not (tmp_path / "lock").exists()


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    """A lock file that cannot be created is an error, unless it exists."""
    with pytest.raises(DataError, match="cannot write"):
        build_or_wait(tmp_path / "no" / "lock", lambda: None, lambda: None, what="x")


def test_a_killed_builder_is_succeeded(tmp_path):
    """A builder that is killed in the midst leaves the work to the one that waits."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from lmcore.data.cache.build_lock import build_or_wait\n"
        "def build(): print('building', flush=True); time.sleep(60)\n"
        "build_or_wait(Path(sys.argv[1]), lambda: None, build, what='x')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"building\n"
    timer = threading.Timer(0.5, process.kill)
    timer.start()
    reaper = threading.Thread(target=process.wait)
    reaper.start()
    assert wait(tmp_path) == "built"
    reaper.join()
    process.stdout.close()
