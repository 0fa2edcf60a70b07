"""Checks of what lazy, compiling and monitored devices offer, which find each wrong one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.contract import Compilations

Findings = Callable[..., tuple[str, ...]]


class Recorder:
    """Recorder whose waits become longer until a boundary, as with a lazy device."""

    def __init__(self) -> None:
        self.recorded = 0
        self.programs = 0

    def boundary(self) -> None:
        """Run what is recorded."""
        self.recorded = 0

    def synchronize(self) -> None:
        """Run all that is recorded since the last boundary, and one step."""
        self.recorded = self.recorded % 12 + 1  # as many steps as the check makes of one model
        self.programs += self.recorded > 1
        time.sleep(0.03 * self.recorded)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch that wait for busy processors would hide the sleeps of `Recorder`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_what_a_device_may_leave_out(findings: Findings) -> None:
    """A device that records nothing, compiles nothing and reports nothing is right."""
    for name in ("health", "compilations", "step-boundary", "inference-mode"):
        assert findings(f"device.{name}") == ()


@pytest.mark.parametrize(
    "health, fault",
    [
        (lambda: "fan 2 stands still", "a fault of a device that computes: fan 2 stands still"),
        (lambda: True, "returned True from `health`"),
        (lambda: 1 / 0, "its health cannot be read: ZeroDivisionError"),
        (lambda: time.sleep(0.15), "takes 0.1"),
    ],
)
def test_wrong_health(findings: Findings, health: Any, fault: str) -> None:
    """A working device that is called unhealthy, another type, an error, and a slow answer."""
    (found,) = findings("device.health", health=health)
    assert fault in found


def test_a_boundary_that_does_nothing(findings: Findings) -> None:
    """Steps of a lazy device become slower, and compile new programs for ever."""
    lazy = Recorder()
    fields = {"synchronize": lazy.synchronize, "step_boundary": lambda: None}
    (found,) = findings("device.step-boundary", **fields)
    assert "steps become slower, from 0." in found
    fields["compilations"] = lambda: Compilations(lazy.programs, 0.0)
    (found,) = findings("device.compilations", **fields)
    assert "6 equal steps after 4 others compiled 6 programs more" in found
    assert findings("device.step-boundary", **{**fields, "step_boundary": lazy.boundary}) == ()


def test_a_boundary_that_raises(findings: Findings) -> None:
    """The boundary is called before anything else, and its error is kept."""
    with pytest.raises(ZeroDivisionError):
        findings("device.step-boundary", step_boundary=lambda: 1 / 0)


def test_wrong_compilations(findings: Findings) -> None:
    """Another type than the record, and numbers that fall."""
    (found,) = findings("device.compilations", compilations=lambda: (3, 1.5))
    assert "returned (3, 1.5) from `compilations`" in found
    falling = itertools.count(20, -1)
    (found,) = findings(
        "device.compilations", compilations=lambda: Compilations(next(falling), 0.0)
    )
    assert "its numbers fall: [20, 19, " in found


def test_a_device_that_cannot_do_inference_mode(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found where it claims to, and right where it declares that it cannot."""
    real = torch.zeros

    def zeros(*given: Any, **named: Any) -> Any:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return real(*given, **named)

    monkeypatch.setattr(torch, "zeros", zeros)
    found = findings("device.inference-mode")
    assert "True, and it raised RuntimeError: Cannot set version_counter" in found[0]
    assert found[1] == "pass `inference_mode=False` to the device"
    assert findings("device.inference-mode", inference_mode=False) == ()


@pytest.mark.parametrize("name", ["device.rng-recompute", "device.dispatch-mode"])
def test_what_the_host_does_right(findings: Findings, name: str) -> None:
    """Draws of the host are made when they are called, and its ops take the tensors of a mode."""
    assert findings(name) == ()


def test_a_restored_state_without_effect(findings: Findings) -> None:
    """Neither a repetition nor what is drawn after it has the right numbers."""
    found = findings("device.rng-recompute", set_rng_state=lambda state: None)
    assert "first draw + second draw: repeated from the saved state, it draws other" in found[0]
    assert "first draw + second draw: the repetition changes the numbers" in found[1]


_TORCHS_LAZY_BACKEND = """
import dataclasses, json, sys
import torch, torch._lazy
from torch._lazy import ts_backend
from lmcore.contract import Device
from lmcore_conformance.bench import Bench
from lmcore_conformance.registry import Failure, all_checks

ts_backend.init()

def wait():
    torch._lazy.mark_step()
    torch._lazy.wait_device_ops()

def seed(number):
    wait()
    torch.default_generator.manual_seed(number)

def get_state():
    wait()
    return torch.get_rng_state()

def set_state(state):
    wait()
    torch.set_rng_state(state)

bench = Bench()
vars(bench)["device"] = Device.from_torch(
    "lazy", index=0, synchronize=wait, set_current=lambda: None, seed=seed,
    get_rng_state=get_state, set_rng_state=set_state, step_boundary=torch._lazy.mark_step,
    inference_mode=False,
)
found = {}
for check in all_checks():
    if check.id in sys.argv[1:]:
        try:
            check.run(bench)
            found[check.id] = []
        except Failure as failure:
            found[check.id] = list(failure.findings)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_lazy_backend_of_torch() -> None:
    """A program draws in the order of its outputs, which a block's repetition has more of.

    Each state waits for what is recorded, so that the other checks of random numbers pass.
    """
    names = ("device.rng-state", "device.rng-streams", "device.rng-recompute")
    done = subprocess.run(
        [sys.executable, "-c", _TORCHS_LAZY_BACKEND, *names, "device.dispatch-mode"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["device.rng-state"], found["device.rng-streams"]) == ([], [])
    assert (
        "draws other numbers; what is drawn between two states" in found["device.rng-recompute"][0]
    )
    assert "within a `TorchDispatchMode` it raised" in found["device.dispatch-mode"][0]
