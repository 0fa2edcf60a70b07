"""Sharded layouts over a communication backend that cannot average: sums, and the same steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import launch
from layouts.results import common_folder, once
from layouts.stored import load
from suite import warm

from lmcore.contract.torch_versions import GLOO_AVERAGE

LAUNCH = Path(launch.__file__)
WORKER = Path(__file__).with_name("sums_worker.py")
WORLD_SIZE = 2

pytestmark = pytest.mark.distributed

CASES = {
    "zero3": "--zero-stage 3 --num-layers 2 --train-iters 2",
    "zero1": "--zero-stage 1 --num-layers 2 --train-iters 2 --micro-batch-size 1",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of each rank, of all cases in one set of processes."""
    folder = common_folder(tmp_path_factory, "sums")
    with once(folder) as missing:
        if missing:
            train(folder)
    return folder


def train(folder: Path) -> None:
    cases = folder / "cases.json"
    cases.write_text(json.dumps(CASES), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}
    command = [sys.executable, str(LAUNCH), "cpu", str(WORLD_SIZE), str(cases), str(folder)]
    done = warm.run([*command, str(WORKER)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def read(folder: Path, name: str, way: str) -> list[dict[str, Any]]:
    """Return the results of all ranks of a run."""
    return [load(folder / f"{name}-{way}.{rank}.found") for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_averaged(name: str, trained: Path) -> None:
    """A backend that averages is asked to; of one that does not only sums are asked.

    Gloo averages only in newer versions of torch.
    """
    usual = set().union(*(one["asked"] for one in read(trained, name, "average")))
    summed = set().union(*(one["asked"] for one in read(trained, name, "sum")))
    assert ("reduce_scatter AVG" in usual) == bool(GLOO_AVERAGE)
    assert "reduce_scatter SUM" in summed
    assert {one.rpartition(" ")[2] for one in summed} <= {"SUM", "MAX"}


@pytest.mark.parametrize("name", CASES)
def test_the_steps_are_the_same(name: str, trained: Path) -> None:
    """Losses, norms, gradients and weights match a backend that averages."""
    for usual, summed in zip(
        read(trained, name, "average"), read(trained, name, "sum"), strict=True
    ):
        steps = (torch.tensor(one["steps"]) for one in (summed, usual))
        torch.testing.assert_close(*steps, rtol=1e-6, atol=0)
        for kind in ("grads", "weights"):
            assert usual[kind]
            for one, other in zip(summed[kind], usual[kind], strict=True):
                assert one[:3] == other[:3]
                torch.testing.assert_close(one[3], other[3], rtol=2e-6, atol=1e-7)
