"""Layouts of two and four simulated devices take the steps of one process on the CPU."""

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
Case, runs = layout_results.Case, layout_results.runs

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first test waits for all cases
]

layout_cases = layout_results.layout_cases


def few(cases: dict[str, str]) -> dict[str, str]:
    """Return cases without two of the ways in which each layout is crossed with accumulation."""
    return {name: flags for name, flags in cases.items() if not name.endswith(layout_cases.MORE)}


OF_TWO, OF_FOUR = few(layout_cases.OF_TWO), few(layout_cases.OF_FOUR)
"""What two and four processes on the CPU are compared in: each layout by itself, and accumulating
with everything computed again."""

DROPPING = (
    "--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 20 --tensor-model-parallel-size 2"
)


@pytest.fixture(scope="module")
def train(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what trains cases in a number of processes of a device, once for all of xdist's."""
    base = tmp_path_factory.getbasetemp()
    if tmp_path_factory.getbasetemp().name.startswith("popen-"):
        base = base.parent

    def go(cases: dict[str, str], world_size: int, device: str) -> Results:
        folder = base / f"sim-layouts-of-{world_size}"
        env = {**environment, "LMCORE_SIM_DEVICES": str(max(world_size, 2))}
        return Results.of(cases, world_size, folder, env=env, device=device, seconds=350)

    return go


@pytest.fixture(scope="module")
def alone(train: Any) -> Results:
    """One process on the CPU."""
    return train(KINDS, 1, "cpu")


@pytest.fixture(scope="module")
def two(train: Any) -> Results:
    """Two processes, each with a simulated device."""
    return train(runs(OF_TWO) | {"dropping": DROPPING}, 2, "sim")


@pytest.fixture(scope="module")
def four(train: Any) -> Results:
    """Four."""
    return train(runs(OF_FOUR), 4, "sim")


def check(name: str, found: Results, alone: Results) -> None:
    case = Case.of(name)
    distance = found.distance(case.name, alone, case.kind)
    assert distance.within(LIMITS[case.kind]), distance


@pytest.mark.parametrize("name", OF_TWO)
def test_two_devices(name: str, two: Results, alone: Results) -> None:
    """They take the steps of one process."""
    check(name, two, alone)


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_devices(name: str, four: Results, alone: Results) -> None:
    """They take the steps of one process."""
    check(name, four, alone)


def test_replicated_parameters_stay_equal(two: Results) -> None:
    """After 20 steps with dropout, what both devices hold is the same, bit for bit."""
    assert len(two.steps("dropping")) == 20
    two.whole("dropping", "weights")
