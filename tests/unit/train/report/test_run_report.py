"""Figures that the report of a run derives from the records of its steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcore.train.report.run_report import RunReport


def test_a_peak_below_a_steps_rate_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """MFU above 100% proves that the peak is too low: a warning says so, once, and MFU ends."""
    report = RunReport.__new__(RunReport)
    report.plan = SimpleNamespace(flops_per_sample=10e9)  # type: ignore[assignment]
    report._peak = 100e9
    assert report._mfu(samples=5, seconds=1.0) == 0.5
    assert [report._mfu(samples=20, seconds=1.0) for _ in range(2)] == [None, None]
    assert report._mfu(samples=5, seconds=1.0) is None
    (record,) = caplog.records
    assert "the device's peak of 100 GFLOP/s, which is too low" in record.getMessage()
