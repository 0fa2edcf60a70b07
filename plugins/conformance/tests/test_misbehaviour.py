"""A device that misbehaves is caught at its level, and says at what."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def failing(results: Any) -> set[str]:
    return {name for name, result in results.items() if result.status == "failed"}


@pytest.mark.parametrize(
    "mode, names, broken, message",
    [
        ("slow-import", "contract.import-time", {"contract.import-time"}, " s"),
        (
            "opens",
            "contract.probe-initialises-nothing contract.probe",
            {"contract.probe-initialises-nothing"},
            "`/dev/zero` stays open",
        ),
        ("not-twice", "contract.idempotent", {"contract.idempotent"}, "info differs"),
        (
            "crash-probe",
            "contract.probe contract.import",
            {"contract.probe"},
            "was killed by SIGABRT",
        ),
        (
            "forgets-rng",
            "device.rng-state device.seed",
            {"device.rng-state"},
            "the restored state is not the one that is read",
        ),
        (
            "live-state",
            "device.rng-state device.seed",
            {"device.rng-state"},
            "changes while numbers are drawn",
        ),
        ("ignores-seed", "device.seed", {"device.seed"}, "one seed gives two sequences"),
        (
            "never-falls",
            "device.memory-rises-and-falls",
            {"device.memory-rises-and-falls"},
            "stay in use when the tensor is gone",
        ),
        ("stale-peak", "device.memory-peak", {"device.memory-peak"}, "after the reset"),
        (
            "no-bfloat16",
            "device.dtype.bfloat16 device.dtype.float32",
            {"device.dtype.bfloat16"},
            "NotImplementedError: no bfloat16 here",
        ),
        (
            "kills-large",
            "device.memory-consistent device.out-of-memory",
            {"device.out-of-memory"},
            "was killed by SIGABRT",
        ),
        (
            "no-memory",
            "device.memory-consistent",
            {"device.memory-consistent"},
            "undeclared gap: the device does not offer bytes in use, by `memory_stats` (not yet",
        ),
        (
            "no-double",
            "device.dtype.float64",
            {"device.dtype.float64"},
            "undeclared gap: the device does not offer matrix products in float64",
        ),
        (
            "offers-closed",
            "device.declaration",
            {"device.declaration"},
            "`float16` is closed, and the device offers matrix products in float16",
        ),
        ("stager", "device.stagers", {"device.stagers"}, "`stale`: `weight` has other numbers"),
        (
            "false-bf16",
            "train.precision-in-force",
            {"train.precision-in-force"},
            "`bf16`: precision `bf16` is not applied",
        ),
    ],
)
def test_each_is_caught(run: Any, mode: str, names: str, broken: set[str], message: str) -> None:
    """The check that is about it fails with the words that name it; its neighbours pass."""
    results = run(mode, *names.split())
    assert failing(results) == broken, results
    (name,) = broken
    text = "\n".join((results[name].detail, *results[name].findings))
    assert message in text
    assert all(results[result].status == "passed" for result in results.keys() - broken)


def test_a_device_that_crashes_when_it_is_created(run: Any) -> None:
    """Level 0 says which hook, level 1 that it cannot be created, the rest is not reached."""
    results = run("crash-create", "contract.*", "device.create", "ops.linear.*", "extras.profiler")
    assert failing(results) == {"contract.offers", "device.create"}
    assert "lmcore_create_device: the process was killed by" in results["contract.offers"].detail
    assert "was killed by SIGSEGV" in results["device.create"].detail
    assert results["ops.linear.forward"].status == "not run"
    assert results["ops.linear.forward"].detail == "not reached: `device.create` failed"


def test_a_wrong_collective(run: Any) -> None:
    """A sum that is wrong on one rank fails its check with the rank's name; the others pass."""
    names = ("distributed.all-reduce", "distributed.broadcast", "distributed.all-gather")
    # The other rank waits for it until the limit.
    results = run("wrong-reduce", *names, patience=0.05)
    assert failing(results) == {"distributed.all-reduce"}
    assert "rank 1: sum of torch.float32: 1 of 1001 numbers are wrong" in (
        results["distributed.all-reduce"].findings
    )


def test_a_collective_that_hangs(run: Any) -> None:
    """The check is given up, with the place of the rank that hangs; those after it are made."""
    names = ("distributed.all-reduce", "distributed.broadcast", "distributed.all-gather")
    results = run("hang-broadcast", *names, patience=0.05)
    assert failing(results) == {"distributed.broadcast"}
    assert "rank 1: no answer in time; it was in `hanging`" in (
        results["distributed.broadcast"].detail
    )


@pytest.mark.full  # test_a_report has the fake that does all but one thing, test_levels.py the CPU
def test_a_fake_that_behaves_passes(run: Any) -> None:
    """The checks that fail in the tests above pass without faults."""
    names = ("contract.*", "device.*", "train.precision-in-force")
    assert failing(run("", *names)) == set()
