"""Wrong streams, of work and of random numbers, and events: a check names the fault of each."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore_conformance.declaration import Declaration

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("lmcore_sim") is None, reason="needs lmcore-sim"),
]


def test_an_event_that_keeps_its_first_record(run: Any) -> None:
    """The finding has each way to wait, and that new events are right; streams pass."""
    names = ("device.events", "device.stream-synchronize")
    results = run("sim-records-once", *names, declaration=Declaration())
    assert results["device.stream-synchronize"].status == "passed", results
    again = "with an event that is recorded again, after all work before its first record is done: "
    events = results["device.events"]
    for wait in ("`wait_event` did not wait", "after `synchronize`", "once `query` is true"):
        assert any(f"{again}{wait}" in line for line in events.findings), events
    assert all(again in line for line in events.findings)


def test_a_collective_that_orders_the_stream_of_its_launch_alone(run: Any) -> None:
    """The finding names the collective and the two streams."""
    found = run("sim-waits-where-launched", "distributed.async")["distributed.async"]
    assert found.status == "failed"
    start = "`all_reduce`, started in one stream and waited for in another: 1,001 of 1,001 numbers"
    assert start in found.detail
    assert found.detail.endswith("`wait` returned before the collective was done")


def test_a_snapshot_without_the_hosts_generator(run: Any) -> None:
    """Streams of the device are right, and the finding says what is not put back."""
    name = "device.rng-streams"
    found = run("sim-forgets-host", name)[name]
    assert found.status == "failed"
    words = "`restore` does not put back the state of the host's generator"
    assert all(line.endswith(words) for line in found.findings), found
