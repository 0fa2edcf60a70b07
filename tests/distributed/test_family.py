"""Training of another family through the `Model` protocol, alone and with data parallelism."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from layouts import launch
from layouts.results import LIMITS, Results, common_folder, once
from suite import warm

LAUNCH = Path(launch.__file__)
WORKER = Path(__file__).with_name("family_worker.py")
CASES = {
    1: {"alone": ""},
    2: {
        "replicas": "--micro-batch-size 1",
        "zero3": "--zero-stage 3 --recompute full",
        "zero1": "--zero-stage 1",
    },
}

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """Results of all cases, by the number of processes."""
    found = {}
    for world_size, cases in CASES.items():
        folder = common_folder(tmp_path_factory, f"family-{world_size}")
        with once(folder) as missing:
            if missing:
                train(cases, world_size, folder)
        found[world_size] = Results(folder, world_size)
    return found


def train(cases: dict[str, str], world_size: int, folder: Path) -> None:
    file = folder / "cases.json"
    file.write_text(json.dumps(cases), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}
    command = [sys.executable, str(LAUNCH), "cpu", str(world_size), str(file), str(folder)]
    done = warm.run([*command, str(WORKER)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_model_trains(trained: dict[int, Results]) -> None:
    """Losses fall, and the weights match the other family."""
    steps = trained[1].steps("alone")
    assert steps[-1][0] < steps[0][0] - 0.05
    names = trained[1].whole("alone", "weights")
    assert {"head.weight", "body.3.feed_forward.up.weight"} <= names.keys()
    assert not any("attention" in name for name in names)


@pytest.mark.parametrize("name", CASES[2])
def test_data_parallelism(name: str, trained: dict[int, Results]) -> None:
    """Two ranks take the steps of one."""
    distance = trained[2].distance(name, trained[1], "alone")
    assert distance.within(LIMITS["fp32"]), distance
