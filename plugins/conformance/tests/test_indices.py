"""Level 1 is made on the first and the last device, and checks what is claimed of memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")
pytest.importorskip("lmcore_sim", reason="lmcore-sim is not installed")

from lmcore_conformance.declaration import Declaration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    "mode, broken, message",
    [
        (
            "sim-memory-of-0",
            "device.memory-rises-and-falls",
            "index 1: a tensor of 64.0 MiB raises it by 0.0 MiB",
        ),
        (
            "sim-streams-of-0",
            "device.current",
            "index 1: `new_stream()` is on `sim:0`, and the device of this process is `sim:1`",
        ),
        ("sim-numbers-of-0", "device.rng-state", "index 1: `rand`: a restored state gives other"),
        (
            "sim-never-current",
            "device.current",
            "index 1: `torch.accelerator.current_device_index()` is on `sim:0`",
        ),
    ],
)
def test_functions_of_another_index_are_caught(
    run: Any, mode: str, broken: str, message: str
) -> None:
    """The checks of the first device pass, and the finding has the index of the last one."""
    results = run(mode, "device.transfer", broken)
    assert results["device.transfer"].status == "passed", results
    assert results[broken].status == "failed"
    assert any(line.startswith(message) for line in results[broken].findings), results
    assert not any(line.startswith("index 0") for line in results[broken].findings)


@pytest.mark.parametrize(
    "mode, broken, message",
    [
        ("sim-pebibyte", "device.memory-consistent", "the total is 1073741824.0 MiB, and torch's"),
        ("sim-small-total", "device.out-of-memory", "a tensor of 0.00293 TiB can be made"),
        ("sim-keeps-cache", "device.memory-cache", "`reserved` fell by 0.0 MiB"),
        (
            "sim-constant-memory",
            "device.memory-rises-and-falls",
            "a tensor of 64.0 MiB raises it by 0.0 MiB",
        ),
        (
            "sim-half-memory",
            "device.memory-rises-and-falls",
            "a tensor of 64.0 MiB raises it by 32.0 MiB",
        ),
        ("sim-reserves-nothing", "device.memory-consistent", "less is reserved than is in use"),
        ("sim-counts-cache", "device.memory-rises-and-falls", "memory of the cache belongs in"),
        ("sim-unpinned", "extras.pinned-memory", "the tensor is not in pinned host memory"),
    ],
)
def test_false_claims_about_memory_are_caught(
    run: Any, mode: str, broken: str, message: str
) -> None:
    """Wrong figures, a cache that is never emptied, and host memory that is not pinned."""
    found = run(mode, broken, declaration=Declaration())[broken]
    assert found.status == "failed"
    assert any(message in line for line in found.findings), found


def test_processes_on_one_device_are_caught(run: Any) -> None:
    """A device record that ignores the local rank fails the first check of level 4."""
    found = run("sim-always-0", "distributed.start")["distributed.start"]
    assert found.status == "failed"
    assert "two processes use one device: [['sim', 0], ['sim', 0]]" in found.detail
