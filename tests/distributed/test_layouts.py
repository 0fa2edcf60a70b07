"""Every layout takes the steps of one process: losses, gradients, gradient norms and weights.

One set of processes of each size trains all cases; a test compares one of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from layouts.cases import (
    CASES,
    CP,
    DROPOUT,
    FAST,
    FULL,
    KINDS,
    PP,
    SP,
    TP,
    ZBV,
    Case,
    marked,
    runs,
)
from layouts.results import LIMITS, Results, assert_equal, common_folder
from layouts.steps import DROPPING_STEPS
from suite.selection import selected

from lmcore.contract.torch_versions import SPLIT_BACKWARD

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(500),  # the first test of a size waits for all cases of that size
]

COMPARED = ("of_two", "of_four", "of_eight")
"""Parameters of the tests that compare with one process."""

DROPPING = {"tp": TP, "tp-full": f"{TP} {FULL}", "tp-sp": f"{TP} {SP}"}
DROPPING_OF_FOUR = {"tp-pp": f"{TP} {PP}", "tp-sp-zero3": f"{TP} {SP} --zero-stage 3"}

REPEATED = {"cp": CP, "tp-sp": f"{TP} {SP}"}
if SPLIT_BACKWARD:
    REPEATED["zero-bubble-v"] = ZBV

COMPILER = shutil.which("g++") or shutil.which("clang++")
COMPILED = {"compiled/tp-sp": f"{TP} {SP} --compile"}


Train = Callable[[str, dict[str, str], int], Results]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Function that trains cases in a number of processes, once for all workers of xdist."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}

    def go(name: str, cases: dict[str, str], world_size: int) -> Results:
        folder = common_folder(tmp_path_factory, f"layouts-{name}")
        return Results.of(cases, world_size, folder, env=env, seconds=450)

    return go


@pytest.fixture(scope="module")
def alone(train: Train, request: pytest.FixtureRequest) -> Results:
    """One process, by itself, in each kind of run that selected tests look at."""
    names = [one for parameter in COMPARED for one in map(str, selected(request, parameter))]
    needed = {"fp32", *map(str, selected(request, "kind")), *(Case.of(one).kind for one in names)}
    return train("alone", {kind: flags for kind, flags in KINDS.items() if kind in needed}, 1)


def selected_of(request: pytest.FixtureRequest, world_size: int, parameter: str) -> dict[str, str]:
    """Return the cases of a number of processes that selected tests look at."""
    cases = CASES[world_size]
    return runs({name: cases[name] for name in map(str, selected(request, parameter))})


@pytest.fixture(scope="module")
def two(train: Train, request: pytest.FixtureRequest) -> Results:
    """Two processes."""
    return train("two", selected_of(request, 2, "of_two"), 2)


@pytest.fixture(scope="module")
def four(train: Train, request: pytest.FixtureRequest) -> Results:
    """Four."""
    return train("four", selected_of(request, 4, "of_four"), 4)


@pytest.fixture(scope="module")
def eight(train: Train, request: pytest.FixtureRequest) -> Results:
    """Eight."""
    return train("eight", selected_of(request, 8, "of_eight"), 8)


def dropping(layouts: dict[str, str]) -> dict[str, str]:
    return {
        f"dropping_{name}": f"{DROPOUT} {DROPPING_STEPS} {flags}" for name, flags in layouts.items()
    }


@pytest.fixture(scope="module")
def two_that_drop(train: Train) -> Results:
    """Two processes that train with dropout."""
    repeated = {
        f"{name}_{kind}": f"{DROPOUT} 2 {flags} --recompute {kind}"
        for name, flags in REPEATED.items()
        for kind in ("none", "full", "selective")
    }
    return train("two-that-drop", dropping(DROPPING) | repeated, 2)


@pytest.fixture(scope="module")
def four_that_drop(train: Train) -> Results:
    """Four."""
    return train("four-that-drop", dropping(DROPPING_OF_FOUR), 4)


@pytest.fixture(scope="module")
def compiled(train: Train) -> Results:
    """Two processes that compile their layers."""
    return train("compiled", runs(COMPILED), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_something_to_compare(kind: str, alone: Results) -> None:
    """Losses fall, gradients are clipped, and kinds of runs differ by more than the limits."""
    steps = alone.steps(kind)
    if kind.startswith(
        ("bert", "ict", "retro", "t5")
    ):  # each step has other targets, few of them; nothing is clipped
        assert steps[-1][0] != steps[0][0]
        return
    assert steps[-1][0] < steps[0][0]
    assert steps[0][1] > 1.0
    if kind in {"documents", "twice", "bf16", "fp16"}:
        assert not alone.distance(kind, alone, "fp32").within(LIMITS["fp32"])
    if kind == "documents":
        assert not alone.distance(kind, alone, "fp32").within(LIMITS["bf16"])


@pytest.mark.parametrize("of_two", marked(CASES[2], FAST[2]))
def test_two_processes(of_two: str, two: Results, alone: Results) -> None:
    """Losses, gradients and weights match one process."""
    assert_equal(of_two, two, alone)


@pytest.mark.parametrize("of_four", marked(CASES[4], FAST[4]))
def test_four_processes(of_four: str, four: Results, alone: Results) -> None:
    """Losses, gradients and weights match one process."""
    assert_equal(of_four, four, alone)


@pytest.mark.parametrize("of_eight", marked(CASES[8], FAST[8]))
def test_eight_processes(of_eight: str, eight: Results, alone: Results) -> None:
    """Losses, gradients and weights match one process."""
    assert_equal(of_eight, eight, alone)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
@pytest.mark.full  # in the fast set two data parallel processes compile, in `tests/train`
def test_compiled_layers(compiled: Results, alone: Results) -> None:
    """Compiled layers take the steps of one process."""
    assert_equal("compiled/tp-sp", compiled, alone)


@pytest.mark.parametrize("name", DROPPING)
def test_replicated_parameters_stay_equal(name: str, two_that_drop: Results) -> None:
    """After some steps with dropout, replicated parameters are equal bit for bit."""
    of_both = [
        {
            tensor
            for tensor, shape, _, values in part["weights"]
            if tuple(shape) == tuple(values.shape)
        }
        for part in two_that_drop.parts(f"dropping_{name}")
    ]
    assert of_both[0] == of_both[1]
    assert {"final_norm.weight", "position_embedding.weight"} <= of_both[0]
    assert_replicas_equal(two_that_drop, name)


@pytest.mark.parametrize("name", DROPPING_OF_FOUR)
def test_replicated_parameters_stay_equal_in_combinations(
    name: str, four_that_drop: Results
) -> None:
    """Replicated parameters stay equal in pipelines and with ZeRO, too."""
    assert_replicas_equal(four_that_drop, name)


def assert_replicas_equal(found: Results, name: str) -> None:
    assert len(found.steps(f"dropping_{name}")) == DROPPING_STEPS
    found.whole(f"dropping_{name}", "weights")  # compares replicas


def test_dropout_of_divided_layers_is_repeated(two_that_drop: Results) -> None:
    """A recomputed layer draws the same random numbers, each rank its own."""
    assert two_that_drop.steps("dropping_tp") == two_that_drop.steps("dropping_tp-full")
    assert two_that_drop.steps("dropping_tp") != two_that_drop.steps("dropping_tp-sp")


@pytest.mark.parametrize("name", REPEATED)
def test_dropout_is_repeated_in_every_layout(name: str, two_that_drop: Results) -> None:
    """Recomputed layers draw the same random numbers, between collectives and in pipelines."""
    wanted = two_that_drop.steps(f"{name}_none")
    assert two_that_drop.steps(f"{name}_full") == two_that_drop.steps(f"{name}_selective") == wanted
