"""Tests of the clock of a run's start."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lmcore.train.report.startup_clock import PhaseClock


def test_first_phase_begins_with_the_process() -> None:
    """The first phase reaches back to the start of the process, and not beyond it."""
    program = """
import time
from lmcore.train.report.startup_clock import PhaseClock
time.sleep(0.3)
clock = PhaseClock()
clock.mark("launcher")
print(clock.seconds["launcher"])
"""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 0.3 <= float(done.stdout) <= time.perf_counter() - began + 0.02


def test_phases_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase lasts from the mark before it; one that comes twice is added up."""
    now = 100.0
    monkeypatch.setattr("lmcore.train.report.startup_clock.time.perf_counter", lambda: now)
    clock = PhaseClock()
    clock.mark("launcher")
    for name, seconds in (("data", 2.0), ("model", 0.5), ("data", 1.0)):
        now += seconds
        clock.mark(name)
    assert list(clock.seconds) == ["launcher", "data", "model"]
    assert clock.seconds["data"] == pytest.approx(3.0)
    assert clock.seconds["model"] == pytest.approx(0.5)
