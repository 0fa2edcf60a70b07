"""A run on a system that gives no more threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest


def test_no_thread_can_be_started(
    train: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run trains, saves and resumes without starting a thread, and its results stay the same."""
    flags = "--train-iters 6 --save-interval 2 --async-save --progress live"
    whole = train("whole", flags)
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first = train("part", f"{flags} --exit-interval 4")
    assert first.status == 0, first.err
    assert {"lmcore-data", "lmcore-checkpoint-writer"} <= set(refused)
    assert "training waits for each micro-batch" in first.err
    second = train("part", f"{flags} --load {first.directory}")
    assert second.status == 0, second.err
    assert second.curve() == whole.curve()
    assert_same(second.saved(), whole.saved())


NO_THREADS = """
import threading
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
"""


def test_no_thread_can_be_started_in_two_processes(
    start: Any, finish: Any, train: Any, assert_same: Any
) -> None:
    """The launcher needs no thread, either, to show the other rank's standard error."""
    flags = "--train-iters 4 --micro-batch-size 2 --global-batch-size 4 --use-distributed-optimizer"
    flags += " --nproc-per-node 2 --async-save --save-interval 2"
    whole = finish(start("whole", flags), "whole")
    run = finish(start("none", flags, before=NO_THREADS), "none")
    assert run.status == 0, run.err
    assert run.curve() == whole.curve()
    assert_same(run.saved(), whole.saved())
    assert "[rank 1] warning: the thread" in run.err
