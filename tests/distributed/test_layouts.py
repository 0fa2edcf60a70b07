"""Every layout takes the steps of one process: losses, gradients, gradient norms and weights.

One set of processes of each size trains all cases; a test compares one of them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "layout_results", Path(__file__).with_name("layout_results.py")
)
layout_results = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = layout_results
_SPEC.loader.exec_module(layout_results)
KINDS, LIMITS, Results = layout_results.KINDS, layout_results.LIMITS, layout_results.Results
Case, runs, layout_cases = layout_results.Case, layout_results.runs, layout_results.layout_cases
OF_TWO, OF_FOUR, OF_EIGHT = layout_cases.OF_TWO, layout_cases.OF_FOUR, layout_cases.OF_EIGHT
TP, SP, CP = layout_cases.TP, layout_cases.SP, layout_cases.CP
PP, ZBV = layout_cases.PP, layout_cases.ZBV
FULL, DROPOUT = layout_cases.FULL, layout_cases.DROPOUT

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(500),  # the first test of a size waits for all cases of that size
]

DROPPING = {"tp": TP, "tp-full": f"{TP} {FULL}", "tp-sp": f"{TP} {SP}"}
DROPPING_OF_FOUR = {"tp-pp": f"{TP} {PP}", "tp-sp-zero3": f"{TP} {SP} --zero-stage 3"}

REPEATED = {"cp": CP, "zero-bubble-v": ZBV, "tp-sp": f"{TP} {SP}"}

COMPILER = shutil.which("g++") or shutil.which("clang++")
COMPILED = {"compiled/tp-sp": f"{TP} {SP} --compile"} if COMPILER else {}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what trains cases in a number of processes, once for all of xdist's workers."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def go(cases: dict[str, str], world_size: int) -> Results:
        folder = base / f"layouts-of-{world_size}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}
        return Results.of(cases, world_size, folder, env=env, seconds=450)

    return go


@pytest.fixture(scope="module")
def alone(train: Any) -> Results:
    """One process, by itself."""
    return train(KINDS, 1)


def dropping(layouts: dict[str, str]) -> dict[str, str]:
    return {f"dropping_{name}": f"{DROPOUT} 20 {flags}" for name, flags in layouts.items()}


@pytest.fixture(scope="module")
def two(train: Any) -> Results:
    """Two processes."""
    repeated = {
        f"{name}_{kind}": f"{DROPOUT} 2 {flags} --recompute {kind}"
        for name, flags in REPEATED.items()
        for kind in ("none", "full", "selective")
    }
    return train(runs(OF_TWO) | dropping(DROPPING) | repeated | runs(COMPILED), 2)


@pytest.fixture(scope="module")
def four(train: Any) -> Results:
    """Four."""
    return train(runs(OF_FOUR) | dropping(DROPPING_OF_FOUR), 4)


@pytest.fixture(scope="module")
def eight(train: Any) -> Results:
    """Eight."""
    return train(runs(OF_EIGHT), 8)


def check(name: str, found: Results, alone: Results) -> None:
    case = Case.of(name)
    distance = found.distance(case.name, alone, case.kind)
    print(name, distance)
    assert distance.within(LIMITS[case.kind]), distance


def test_there_is_something_to_compare(alone: Results) -> None:
    """Losses fall, gradients are clipped, and kinds of runs differ by more than the limits."""
    for kind in KINDS:
        steps = alone.steps(kind)
        assert steps[-1][0] < steps[0][0]
        assert steps[0][1] > 1.0, kind
    for kind in ("documents", "twice", "bf16", "fp16"):
        assert not alone.distance(kind, alone, "fp32").within(LIMITS["fp32"]), kind
    assert not alone.distance("documents", alone, "fp32").within(LIMITS["bf16"])


@pytest.mark.parametrize("name", OF_TWO)
def test_two_processes(name: str, two: Results, alone: Results) -> None:
    """They take the steps of one."""
    check(name, two, alone)


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_processes(name: str, four: Results, alone: Results) -> None:
    """They take the steps of one."""
    check(name, four, alone)


@pytest.mark.parametrize("name", OF_EIGHT)
def test_eight_processes(name: str, eight: Results, alone: Results) -> None:
    """They take the steps of one."""
    check(name, eight, alone)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_compiled_layers(two: Results, alone: Results) -> None:
    """Compiled layers exchange what the others do."""
    check("compiled/tp-sp", two, alone)


@pytest.mark.parametrize("name", DROPPING)
def test_replicated_parameters_stay_equal(name: str, two: Results) -> None:
    """After 20 steps with dropout, what both processes hold is the same, bit for bit."""
    of_both = [
        {
            tensor
            for tensor, shape, _, values in part["weights"]
            if tuple(shape) == tuple(values.shape)
        }
        for part in two.parts(f"dropping_{name}")
    ]
    assert of_both[0] == of_both[1]
    assert {"final_norm.weight", "position_embedding.weight"} <= of_both[0]
    assert_replicas_equal(two, name)


@pytest.mark.parametrize("name", DROPPING_OF_FOUR)
def test_replicated_parameters_stay_equal_in_combinations(name: str, four: Results) -> None:
    """The same in stages of a pipeline, or with weights that data parallel processes share."""
    assert_replicas_equal(four, name)


def assert_replicas_equal(found: Results, name: str) -> None:
    assert len(found.steps(f"dropping_{name}")) == 20
    found.whole(f"dropping_{name}", "weights")  # compares what it finds twice


def test_dropout_of_divided_layers_is_repeated(two: Results) -> None:
    """A layer that is computed again draws the numbers that it drew, each part its own."""
    assert two.steps("dropping_tp") == two.steps("dropping_tp-full")
    assert two.steps("dropping_tp") != two.steps("dropping_tp-sp")


@pytest.mark.parametrize("name", REPEATED)
def test_dropout_is_repeated_in_every_layout(name: str, two: Results) -> None:
    """What is computed again, between exchanges or in a pipeline's turns, draws what it drew."""
    wanted = two.steps(f"{name}_none")
    assert two.steps(f"{name}_full") == two.steps(f"{name}_selective") == wanted
