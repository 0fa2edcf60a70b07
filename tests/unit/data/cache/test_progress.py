"""Progress of builds that take longer than a moment."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import pytest

from lmcore.data.cache.progress import BuildProgress, log_progress, report_progress


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until *condition* holds."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_long_build_is_reported_and_a_short_one_is_not():
    """Reports have the work done by then; a build that ends before the first report is silent."""
    seen: list[BuildProgress] = []
    with report_progress("x", 100, seen.append, first=5.0) as counter:
        counter[0] += 100
    assert seen == []
    with report_progress("x", 100, seen.append, first=0.005) as counter:
        for part in range(1, 11):
            counter[0] += 10
            wait_for(lambda part=part: len(seen) >= part // 5)
    assert len(seen) >= 2
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert all(0 < one.fraction <= 1 and one.seconds > 0 for one in seen)


def test_a_log_is_not_filled(monkeypatch):
    """The first report comes at once, later ones at every tenth look at the counter."""

    @contextlib.contextmanager
    def look_often(work, seconds, **_):
        for _ in range(21):
            work()
        yield

    monkeypatch.setattr("lmcore.data.cache.progress.periodically", look_often)
    seen: list[BuildProgress] = []
    with report_progress("x", 100, seen.append):
        pass
    assert len(seen) == 3


def test_an_error_in_the_build_ends_the_reports():
    """The thread that reports is gone when the block is left by an error."""
    seen: list[BuildProgress] = []

    def build():
        with report_progress("x", 0, seen.append, first=0.02):
            wait_for(lambda: seen)
            {}["missing"]

    with pytest.raises(KeyError):
        build()
    count = len(seen)
    time.sleep(0.3)
    assert len(seen) == count > 0
    assert seen[0].fraction is None


def test_the_line_in_the_log(caplog):
    """A line names the build, its share and its time; without a total, its time alone."""
    with caplog.at_level(logging.INFO):
        log_progress(BuildProgress("the index", 1, 4, 2.0))
        log_progress(BuildProgress("the mapping", 1, 0, 3.0))
    assert [record.getMessage() for record in caplog.records] == [
        "building the index: 25%, 2 s",
        "building the mapping: 3 s",
    ]
