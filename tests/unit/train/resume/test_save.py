"""Checkpoints at once or in the background: what waits for what, and where failures come out."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from suite.threads import idle_threads

from lmcore.base.errors import CheckpointError
from lmcore.train.resume.save import WRITER_NAME, Saver

HERE = Path("checkpoints")
try:
    NATIVE: Any = importlib.import_module("lmcore._native")
except ImportError:
    NATIVE = None


class Disk:
    """Takes snapshots whose writing a test can hold up and fail."""

    def __init__(self) -> None:
        self.iteration = 0
        self.events: list[str] = []
        self.go = threading.Event()
        self.error: Exception | None = None

    def take(self) -> Any:
        """Return a snapshot of the next iteration."""
        self.iteration += 1
        self.events.append(f"take {self.iteration}")
        return Moment(self, self.iteration)


class Moment:
    """A snapshot."""

    def __init__(self, disk: Disk, iteration: int) -> None:
        self.disk = disk
        self.directory, self.iteration = HERE, iteration

    def write(self) -> Path:
        """Wait until it may be written."""
        assert self.disk.go.wait(10)
        if self.disk.error is not None:
            raise self.disk.error
        self.disk.events.append(f"written {self.iteration}")
        return HERE / f"iter_{self.iteration:07d}"


@pytest.fixture
def disk() -> Iterator[Disk]:
    """A disk; no writer is left behind."""
    found = Disk()
    yield found
    found.go.set()
    for thread in threading.enumerate():
        if thread.name == WRITER_NAME:
            thread.join(10)
            assert not thread.is_alive()


def later(act: Callable[[], None]) -> threading.Thread:
    """Do something while the test waits."""
    thread = threading.Thread(target=lambda: (time.sleep(0.1), act()))
    thread.start()
    return thread


def test_at_once(disk: Disk) -> None:
    """In the foreground a checkpoint is written when the call returns."""
    disk.go.set()
    with Saver(disk.take, background=False) as saver:
        assert saver.save() == HERE / "iter_0000001"
        assert disk.events == ["take 1", "written 1"]


def test_in_the_background(disk: Disk) -> None:
    """The call returns before the checkpoint is written, with the path that it gets."""
    with Saver(disk.take, background=True) as saver:
        assert saver.save() == HERE / "iter_0000001"
        assert disk.events == ["take 1"]
        saver.raise_background_error()
        helper = later(disk.go.set)
    helper.join()
    assert disk.events == ["take 1", "written 1"]


def test_the_next_one_waits(disk: Disk) -> None:
    """A second state is not taken before the first one is written: its buffers may be the same."""
    with Saver(disk.take, background=True) as saver:
        saver.save()
        helper = later(disk.go.set)
        saver.save()
        saver.wait()
    helper.join()
    assert disk.events == ["take 1", "written 1", "take 2", "written 2"]


@pytest.mark.parametrize("where", ["raise", "save", "wait", "end"])
def test_a_failure_is_raised(disk: Disk, where: str) -> None:
    """A write that failed comes out at the next step, save or end, once, as it is."""
    disk.error = CheckpointError("the disk is full")
    disk.go.set()
    saver = Saver(disk.take, background=True)
    saver.save()
    (writer,) = [one for one in threading.enumerate() if one.name == WRITER_NAME] or [None]
    if writer is not None:
        writer.join()
    calls = {"raise": saver.raise_background_error, "save": saver.save, "wait": saver.wait}
    calls["end"] = lambda: saver.__exit__(None, None, None)
    with pytest.raises(CheckpointError) as caught:
        calls[where]()
    assert caught.value is disk.error
    assert disk.events == ["take 1"]
    saver.raise_background_error()


def test_an_error_of_the_run_comes_first(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """A failed run finishes its unfinished checkpoint; a failure to do so is a warning."""
    disk.go.set()
    with pytest.raises(KeyError, match="the run"), Saver(disk.take, background=True) as saver:  # noqa: PT012 - what happens inside is the test
        saver.save()
        raise KeyError("the run")
    assert disk.events == ["take 1", "written 1"]
    disk.error = CheckpointError("the disk is full")
    with pytest.raises(KeyError, match="the run"), Saver(disk.take, background=True) as saver:  # noqa: PT012 - what happens inside is the test
        saver.save()
        raise KeyError("the run")
    assert "the disk is full" in caplog.text


def test_an_interrupt_does_not_wait(disk: Disk) -> None:
    """An interrupted run does not wait for the disk."""
    with pytest.raises(KeyboardInterrupt), Saver(disk.take, background=True) as saver:  # noqa: PT012 - what happens inside is the test
        saver.save()
        raise KeyboardInterrupt
    assert disk.events == ["take 1"]


@pytest.mark.skipif(not hasattr(NATIVE, "BackgroundWriter"), reason="a build without this writer")
def test_who_waits_gets_the_processor(disk: Disk) -> None:
    """A save that is waited for no longer leaves all other work the processor first."""
    started, threads = threading.Event(), []

    def count_threads() -> int:
        with Path(os.devnull).open("wb", buffering=0) as file:
            writer = NATIVE.BackgroundWriter(file.fileno())
            writer.append(bytes(1 << 20))
            found = len(idle_threads())
            writer.finish()
        return found

    class Waiting(Moment):
        def write(self) -> Path:
            threads.append(count_threads())
            started.set()
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and threads[-1]:
                threads.append(count_threads())
            return super().write()

    disk.go.set()
    saver = Saver(lambda: Waiting(disk, 1), background=True)
    saver.save()
    assert started.wait(10)
    saver.wait()
    assert (threads[0], threads[-1]) == (1, 0)
