"""With masked targets, the loss is the mean over the valid ones of the global batch everywhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from layouts import launch
from layouts.cases import CP, PP, SP, TP, marked
from layouts.results import LIMITS, Distance, Results, common_folder, once
from suite import warm
from suite.selection import selected

LAUNCH = Path(launch.__file__)
WORKER = Path(__file__).with_name("masked_worker.py")
COMMON = "--eod-mask-loss --precision fp64 --clip-grad 0 --eval-iters 2 --train-iters 2"
MEANS = "--no-calculate-per-token-loss --micro-batch-size"
CASES = {
    1: {
        "at-once": "--micro-batch-size 8",
        "one-by-one": "--micro-batch-size 1",
        "means-of-4": f"{MEANS} 4",
        "means-of-1": f"{MEANS} 1",
    },
    2: {
        "dp": "--micro-batch-size 4",
        "dp-one-by-one": "--micro-batch-size 1",
        "zero1": "--zero-stage 1 --micro-batch-size 2",
        "zero2-one-by-one": "--zero-stage 2 --micro-batch-size 1",
        "zero3": "--zero-stage 3 --micro-batch-size 2",
        "cp-one-by-one": f"{CP} --micro-batch-size 1",
        "pp-one-by-one": f"{PP} --micro-batch-size 1",
        "zero-bubble": f"{PP} --pipeline-schedule zero-bubble --micro-batch-size 2",
        "tp-sp-one-by-one": f"{TP} {SP} --micro-batch-size 1",
        "means-dp": f"{MEANS} 4",
    },
    4: {
        "cp-pp": f"{CP} {PP} --micro-batch-size 1",
        "cp-zero3": f"{CP} --zero-stage 3 --micro-batch-size 1",
        "pp-dp": f"{PP} --micro-batch-size 1",
        "tp-sp-dp": f"{TP} {SP} --micro-batch-size 2",
    },
}
OF_ONE = [name for name in CASES[1] if not name.startswith("means")]
OF_TWO = [name for name in CASES[2] if not name.startswith("means")]
FAST = {"dp-one-by-one", "zero2-one-by-one", "cp-one-by-one", "pp-one-by-one", "tp-sp-one-by-one"}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[int, Results]:
    """Results of all cases of selected tests, by the number of processes."""
    found = {}
    wanted = {1: CASES[1], 2: {}, 4: {}}
    for size, parameter in ((2, "of_two"), (4, "of_four")):
        names = [*map(str, selected(request, parameter)), *["means-dp"] * (size == 2)]
        wanted[size] = {name: CASES[size][name] for name in names}
    for world_size, cases in wanted.items():
        folder = common_folder(tmp_path_factory, f"masked-{world_size}")
        with once(folder) as missing:
            if missing and cases:
                train(cases, world_size, folder)
        found[world_size] = Results(folder, world_size)
    return found


def train(cases: dict[str, str], world_size: int, folder: Path) -> None:
    file = folder / "cases.json"
    flags = {name: f"{COMMON} {more}" for name, more in cases.items()}
    file.write_text(json.dumps(flags), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}
    command = [sys.executable, str(LAUNCH), "cpu", str(world_size), str(file), str(folder)]
    done = warm.run([*command, str(WORKER)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", OF_ONE)
def test_one_process_against_plain_torch(name: str, trained: dict[int, Results]) -> None:
    """Loss, gradients and validation loss are sums over valid targets, divided by their number."""
    (found,) = trained[1].parts(name)
    plain = found["plain"]
    loss, norm = found["steps"][0]
    limit = LIMITS["fp64"]
    assert loss == pytest.approx(plain["loss"], rel=limit.loss)  # reported in float32
    assert norm == pytest.approx(plain["norm"], rel=limit.norm)
    assert found["valid"] == pytest.approx(found["plain_valid"], rel=limit.loss)
    grads = trained[1].whole(name, "grads")
    assert grads.keys() == plain["grads"].keys()
    for parameter, wanted in plain["grads"].items():
        largest = float(wanted.abs().max())
        torch.testing.assert_close(
            grads[parameter], wanted, rtol=0, atol=limit.gradient * largest, msg=parameter
        )


def assert_equal(found: Results, name: str, alone: Results, other: str = "at-once") -> None:
    distance = found.distance(name, alone, other)
    assert distance.within(LIMITS["fp64"]), distance
    wanted = alone.parts(other)[0]["valid"]
    valid = [part["valid"] for part in found.parts(name)]
    assert valid == pytest.approx([wanted] * len(valid), rel=LIMITS["fp64"].loss)


@pytest.mark.parametrize("of_two", marked(OF_TWO, FAST))
def test_two_processes(of_two: str, trained: dict[int, Results]) -> None:
    """Losses, gradients, weights and validation loss match one process."""
    assert_equal(trained[2], of_two, trained[1])


@pytest.mark.parametrize("of_four", marked(CASES[4], {"cp-pp"}))
def test_four_processes(of_four: str, trained: dict[int, Results]) -> None:
    """Losses, gradients, weights and validation loss match one process."""
    assert_equal(trained[4], of_four, trained[1])


def test_mean_of_means(trained: dict[int, Results]) -> None:
    """Without the setting each micro-batch counts alike: the result depends on their size."""
    assert_equal(trained[2], "means-dp", trained[1], "means-of-4")
    far = Distance(loss=1e-4, norm=1e-4, gradient=1e-4, weight=1e-4)
    for one, other in (("means-of-1", "means-of-4"), ("means-of-4", "at-once")):
        distance = trained[1].distance(one, trained[1], other)
        assert distance.loss > far.loss, distance
        assert distance.gradient > far.gradient, distance
