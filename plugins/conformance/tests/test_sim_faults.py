"""Injected faults of the simulated device are caught at the level that the fault belongs to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")
pytest.importorskip("lmcore_sim", reason="lmcore-sim is not installed")

from lmcore.plugin import discover
from lmcore_conformance.declaration import find_declaration, read_declaration
from lmcore_conformance.registry import all_checks
from lmcore_conformance.result import Result
from lmcore_conformance.runner import Runner
from lmcore_conformance.target import find_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes checks of the sim under faults."""

    def make(faults: str, *ids: str, patience: float = 1.0) -> dict[str, Result]:
        monkeypatch.setenv("LMCORE_SIM_FAULTS", faults)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        if "sim" not in {plugin.name for plugin in discover(probe=False)}:
            pytest.skip("lmcore-sim is importable, but no plugin: install it")
        checks = all_checks()
        target = find_target("sim")
        declaration = read_declaration(find_declaration(target.module), checks)
        runner = Runner(target, declaration, checks, patience=patience)
        runner.choose(ids)
        return {name: runner.result(name) for name in ids}

    return make


@pytest.mark.parametrize(
    "faults, good, bad, message",
    [
        ("fail:gelu@1", "ops.linear.forward", "ops.bias_gelu.forward", "RuntimeError"),
        ("wrong:gelu=1.001", "ops.linear.forward", "ops.bias_gelu.forward", "times the tolerance"),
        (
            "wrong:native_layer_norm_backward=1.001",
            "ops.layer_norm.forward",
            "ops.layer_norm.backward",
            "times the tolerance",
        ),
        ("wrong:mm=1.001", "device.transfer", "device.dtype.float32", "what is allowed"),
        ("no-rng-restore", "device.seed", "device.rng-state", "is not the one that is read"),
        ("no-autocast", "train.repeat", "train.precision-in-force", "`bf16`"),
        (
            "no-synchronize",
            "device.events",
            "device.synchronize",
            "after `synchronize` the result of",
        ),
        (
            "no-stream-synchronize",
            "device.events",
            "device.stream-synchronize",
            "after `synchronize` of the stream its work is not finished",
        ),
        (
            "no-event-synchronize",
            "device.streams",
            "device.events",
            "after `synchronize` of an event, work before the event is not finished",
        ),
        (
            "no-stream-wait",
            "device.stream-synchronize",
            "device.streams",
            "`wait_stream` did not wait: the second stream read a result of the first",
        ),
        (
            "no-stream-wait",
            "device.synchronize",
            "device.events",
            "`wait_event` did not wait: the second stream read a result of the first",
        ),
        (
            "query-always-true",
            "device.streams",
            "device.stream-synchronize",
            "once `query` of the stream is true its work is not finished",
        ),
        (
            "query-always-true",
            "device.synchronize",
            "device.events",
            "once `query` is true of an event, work before the event is not finished",
        ),
        (
            "autocast-only:mm",
            "device.transfer",
            "train.precision-in-force",
            "9 of 12 products are in float32, not bfloat16: bmm 6 (2 forward, 4 backward), mm 2",
        ),
        (
            "autocast-only:mm;autocast-only:addmm",
            "device.transfer",
            "extras.autocast",
            "bmm: not in bfloat16: bmm 3 (1 forward, 2 backward)",
        ),
        ("lose:mm@1", "device.transfer", "device.dtype.float32", "lost"),
        pytest.param(
            "wrong:all_reduce#1",
            "distributed.broadcast",
            "distributed.all-reduce",
            "rank 1: sum of torch.float32",
            marks=pytest.mark.full,  # the fake of test_misbehaviour.py fails the same check
        ),
        ("fail:all_gather", "distributed.broadcast", "distributed.all-gather", "RuntimeError"),
        ("wrong:reduce_scatter", "distributed.all-reduce", "distributed.reduce-scatter", "wrong"),
        ("wrong:reduce_scatter", "parallel.pipeline", "parallel.context", "norms differ by"),
    ],
)
def test_each_fault_is_caught(run: Any, faults: str, good: str, bad: str, message: str) -> None:
    """The check of what is broken fails with words that say how; what is not broken passes."""
    # If one of two processes finds a fault, the other waits for it until the limit.
    patience = 0.15 if message.startswith("rank 1: ") else 1.0
    results = run(faults, good, bad, patience=patience)
    assert results[good].status == "passed", results
    assert results[bad].status == "failed", results
    assert any(message in line for line in (results[bad].detail, *results[bad].findings))


@pytest.mark.full  # the fake of test_misbehaviour.py hangs in the same check
def test_a_collective_that_hangs(run: Any) -> None:
    """It is given up within its limit; the checks around it are made."""
    names = ("distributed.all-reduce", "distributed.broadcast", "distributed.all-gather")
    results = run("hang:broadcast", *names, patience=0.15)
    assert Counter(result.status for result in results.values()) == {"passed": 2, "failed": 1}, (
        results
    )
    assert "no answer in time" in results["distributed.broadcast"].detail


def test_a_slow_device_passes(run: Any) -> None:
    """Slowness alone is no failure."""
    results = run("slow=200us", "device.transfer", "ops.linear.forward", "device.seed")
    assert {result.status for result in results.values()} == {"passed"}


@pytest.mark.full  # test_levels.py makes all checks of it
def test_a_sim_without_faults_passes(run: Any) -> None:
    """All that the faults break holds without them."""
    names = ("ops.bias_gelu.forward", "ops.layer_norm.backward", "device.dtype.float32")
    more = ("device.rng-state", "train.precision-in-force", "distributed.all-reduce")
    results = run("", *names, *more, "device.declaration")
    assert {result.status for result in results.values()} == {"passed"}, results
