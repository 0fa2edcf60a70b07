"""Number of processes on several devices, with and without a communication backend."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.cli.device_count import default_process_count
from lmcore.contract import Probe, ProbeState
from lmcore.plugin import HANDED_DOWN, Selection
from lmcore.runtime.launch.rank import RankInfo


def counted(monkeypatch: Any, *, devices: int, hooks: tuple[str, ...], outcome: Any = None) -> int:
    """Return the number of processes; *outcome* is the isolated call's, None if none is made."""
    selection = Selection(
        "chip", "lmcore-chip", "1", Probe("chip", ProbeState.PRESENT, devices), "on trial"
    )
    record = SimpleNamespace(implements=lambda hook: hook in hooks)
    plugins: Any = SimpleNamespace(
        usable_record=lambda name: record, participants=lambda name: [record]
    )

    def call(target: str, *, timeout: float, env: Any) -> Any:
        assert target == "lmcore.cli.device_count:missing_backend"
        assert Selection.from_json(env[HANDED_DOWN]) == selection
        assert outcome is not None
        return outcome

    monkeypatch.setattr("lmcore.cli.device_count.call_isolated", call)
    return default_process_count(plugins, selection, RankInfo(0, 0, 1, 1))


def test_nothing_is_called_where_the_answer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device is one process; a plugin that brings backends has one process for each device."""
    assert counted(monkeypatch, devices=1, hooks=()) == 1
    assert counted(monkeypatch, devices=4, hooks=("lmcore_comm_backends",)) == 4


@pytest.mark.parametrize(
    "fault, value, expected",
    [
        ("", None, None),
        ("", "no backend", "processes on them cannot exchange tensors (no backend)"),
        ("the process ended with status 7", None, "failed (the process ended with status 7)"),
        ("no answer within 120 s; stopped", None, "failed (no answer within 120 s; stopped)"),
    ],
)
def test_several_devices_without_a_backend_are_one_process(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    value: str | None,
    expected: str | None,
) -> None:
    """The line has the reason, a missing backend or a query that failed, and the remedy."""
    outcome = SimpleNamespace(fault=fault, value=value)
    with caplog.at_level(logging.INFO):
        count = counted(monkeypatch, devices=4, hooks=(), outcome=outcome)
    assert count == (1 if expected else 4)
    if expected is None:
        assert not caplog.text
        return
    assert "one process, on 1 of 4 devices" in caplog.text
    assert expected in caplog.text
    assert ("cannot exchange tensors" in caplog.text) == bool(value)
    assert "`--nproc-per-node 4`" in caplog.text
