"""Figures that are derived from the times of a run's steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcore.train.report.speed import Speed


def test_a_peak_below_a_steps_rate_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """MFU above 100% proves that the peak is too low: a warning says so, once, and MFU ends."""
    speed = Speed.__new__(Speed)
    speed.plan = SimpleNamespace(flops_per_sample=10e9)  # type: ignore[assignment]
    speed.peak = 100e9
    assert speed.mfu(samples=5, seconds=1.0) == 0.5
    assert [speed.mfu(samples=20, seconds=1.0) for _ in range(2)] == [None, None]
    assert speed.mfu(samples=5, seconds=1.0) is None
    (record,) = caplog.records
    assert "the device's peak of 100 GFLOP/s, which is too low" in record.getMessage()
