"""Layouts of two and four simulated devices take the steps of one process on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from layouts.cases import CASES, KINDS, MORE, Case, cover, levels, marked, runs
from layouts.results import Results, assert_equal, common_folder
from layouts.steps import DROPPING_STEPS
from suite.selection import selected

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first test waits for all cases
]


def few(cases: Mapping[str, str]) -> dict[str, str]:
    """Return cases without two of the ways in which each layout is crossed with accumulation."""
    return {name: flags for name, flags in cases.items() if not name.endswith(MORE)}


TRIED = {size: few(CASES[size]) for size in (2, 4)}
"""Cases on two and four processes of the CPU: each layout alone, and accumulation with full
recomputation."""

OF_THE_MODEL_ALONE = {"documents", "lamb", "llama", "twice", "uneven"}
"""Kinds that change nothing for the device, but for the ops of `llama-documents`."""


def of_the_device(levels_of: Mapping[str, str]) -> set[Any]:
    """Return levels of a case, without levels that change the order of work only (schedules)."""
    found = dict(levels_of)
    if "pipeline" in found:
        found["pipeline"] = ""
    if found["kind"] in OF_THE_MODEL_ALONE:
        del found["kind"]
    return levels(found)


FAST = cover(TRIED, of_the_device)
"""Cases of the fast set; losses of all layouts are compared on the CPU (`tests/distributed`)."""

DROPPING = (
    f"--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters {DROPPING_STEPS}"
    " --tensor-model-parallel-size 2"
)


@pytest.fixture(scope="module")
def train(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what trains cases in a number of processes of a device, once for all of xdist's."""

    def go(name: str, cases: Mapping[str, str], world_size: int, device: str) -> Results:
        folder = common_folder(tmp_path_factory, f"sim-layouts-{name}")
        env = {**environment, "LMCORE_SIM_DEVICES": str(max(world_size, 2))}
        return Results.of(cases, world_size, folder, env=env, device=device, seconds=350)

    return go


def selected_of(request: pytest.FixtureRequest, size: int, parameter: str) -> dict[str, str]:
    """Return the cases of a number of processes that selected tests look at."""
    return {name: TRIED[size][name] for name in map(str, selected(request, parameter))}


@pytest.fixture(scope="module")
def alone(train: Any, request: pytest.FixtureRequest) -> Results:
    """One process on the CPU, in each kind of run that is selected."""
    names = [*selected_of(request, 2, "of_two"), *selected_of(request, 4, "of_four")]
    kinds = dict.fromkeys(Case.of(name).kind for name in names)
    return train("alone", {kind: KINDS[kind] for kind in kinds}, 1, "cpu")


@pytest.fixture(scope="module")
def two(train: Any, request: pytest.FixtureRequest) -> Results:
    """Two processes, each with a simulated device."""
    cases = runs(selected_of(request, 2, "of_two"))
    return train("two", cases | {"dropping": DROPPING}, 2, "sim")


@pytest.fixture(scope="module")
def four(train: Any, request: pytest.FixtureRequest) -> Results:
    """Four processes, each with a simulated device."""
    return train("four", runs(selected_of(request, 4, "of_four")), 4, "sim")


@pytest.mark.parametrize("of_two", marked(TRIED[2], FAST[2]))
def test_two_devices(of_two: str, two: Results, alone: Results) -> None:
    """They take the steps of one process."""
    assert_equal(of_two, two, alone)


@pytest.mark.parametrize("of_four", marked(TRIED[4], FAST[4]))
def test_four_devices(of_four: str, four: Results, alone: Results) -> None:
    """They take the steps of one process."""
    assert_equal(of_four, four, alone)


def test_replicated_parameters_stay_equal(two: Results) -> None:
    """After some steps with dropout, what both devices hold is the same, bit for bit."""
    assert len(two.steps("dropping")) == DROPPING_STEPS
    two.whole("dropping", "weights")
