"""Layouts of two simulated devices take the steps of one process on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).parents[3] / "tests/distributed/layout_results.py"
_SPEC = importlib.util.spec_from_file_location("layout_results", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
layout_results = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = layout_results
_SPEC.loader.exec_module(layout_results)
KINDS, LIMITS, Results = layout_results.KINDS, layout_results.LIMITS, layout_results.Results

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first test waits for all cases
]

TP = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
CP = "--context-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"

CASES = {
    "dp-accumulating": ("fp32", "--micro-batch-size 1"),
    "zero1": ("fp32", "--zero-stage 1"),
    "zero2": ("fp32", "--zero-stage 2"),
    "zero3-full": ("fp32", "--zero-stage 3 --recompute full"),
    "tp": ("fp32", TP),
    "tp-sp-selective": ("fp32", f"{TP} {SP} --recompute selective"),
    "cp-documents": ("documents", CP),
    "pp": ("fp32", PP),
    "interleaved": ("fp32", f"{PP} --num-layers-per-virtual-pipeline-stage 1"),
    "zero-bubble": ("fp32", f"{PP} --pipeline-schedule zero-bubble"),
    "zero-bubble-v-uneven": ("uneven", f"{PP} --pipeline-schedule zero-bubble-v"),
    "tp-sp-bf16": ("bf16", f"{TP} {SP}"),
    "zero3-fp16": ("fp16", "--zero-stage 3"),
    "pp-twice": ("twice", PP),
}
"""Kind of run (see `layout_results.py`) and flags."""

DROPPING = f"--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 20 {TP}"


@pytest.fixture(scope="module")
def train(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what trains cases in a number of processes of a device, once for all of xdist's."""
    base = tmp_path_factory.getbasetemp()
    if tmp_path_factory.getbasetemp().name.startswith("popen-"):
        base = base.parent

    def go(cases: dict[str, str], world_size: int, device: str) -> Results:
        folder = base / f"sim-layouts-of-{world_size}"
        return Results.of(cases, world_size, folder, env=environment, device=device, seconds=350)

    return go


@pytest.fixture(scope="module")
def alone(train: Any) -> Results:
    """One process on the CPU."""
    return train(KINDS, 1, "cpu")


@pytest.fixture(scope="module")
def two(train: Any) -> Results:
    """Two processes, each with a simulated device."""
    cases = {name: f"{KINDS[kind]} {flags}" for name, (kind, flags) in CASES.items()}
    return train(cases | {"dropping": DROPPING}, 2, "sim")


@pytest.mark.parametrize("name", CASES)
def test_two_devices(name: str, two: Results, alone: Results) -> None:
    """They take the steps of one process."""
    kind = CASES[name][0]
    distance = two.distance(name, alone, kind)
    assert distance.within(LIMITS[kind]), distance


def test_replicated_parameters_stay_equal(two: Results) -> None:
    """After 20 steps with dropout, what both devices hold is the same, bit for bit."""
    assert len(two.steps("dropping")) == 20
    two.whole("dropping", "weights")
