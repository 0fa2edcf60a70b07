"""Functions between steps that wait for the device are found, with the function and the wait."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("lmcore_sim") is None, reason="needs lmcore-sim"),
]


@pytest.mark.parametrize(
    "mode, slow, message",
    [
        ("health-waits", "", "`health` calls `torch.accelerator.synchronize`, which waits for all"),
        pytest.param(
            *("boundary-waits", ""),
            "`step_boundary` calls `Device.synchronize`, which waits for all",
            marks=pytest.mark.full,
        ),
        ("boundary-reads", "", "`step_boundary` waits: work that is queued before it is done when"),
        # Work of the simulated device takes time only if that is asked for; an event shows it.
        pytest.param(
            *("health-reads-unpinned", "slow=200us"),
            "`health` waits: work that is queued before it",
            marks=pytest.mark.full,
        ),
        pytest.param("stagers", "", "", marks=pytest.mark.full),  # test_levels.py has the device
    ],
)
def test_a_function_that_waits(
    run: Any, monkeypatch: pytest.MonkeyPatch, mode: str, slow: str, message: str
) -> None:
    """The finding names it; the other functions of the device, and a right device, have none."""
    monkeypatch.setenv("LMCORE_SIM_FAULTS", slow)
    result = run(f"sim-{mode}", "device.does-not-wait")["device.does-not-wait"]
    assert len(result.findings) == 2 * bool(message), result  # on each of two devices
    assert all(message in line for line in result.findings)
