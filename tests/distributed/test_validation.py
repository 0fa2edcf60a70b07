"""Ranks that validate together stop together, for any reason and on any rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from layouts import launch
from layouts.results import common_folder, once
from suite import warm

WORKER = Path(__file__).with_name("validation_worker.py")
LIMIT_SECONDS = 100

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

CASES = {
    "dp": "",
    "zero3": "--zero-stage 3",
    "tp-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp": "--context-parallel-size 2",
    "pp": "--pipeline-model-parallel-size 2",
}
FLAGS = "--eval-iters 2 --micro-batch-size 1 --distributed-timeout-minutes 1"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of both ranks, by case, of one set of processes."""
    folder = common_folder(tmp_path_factory, "validations")
    with once(folder) as missing:
        if missing:
            validate(folder)
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]
        for name in CASES
    }


def validate(folder: Path) -> None:
    listed = folder / "cases.json"
    listed.write_text(json.dumps({name: f"{FLAGS} {more}" for name, more in CASES.items()}))
    command = [launch.__file__, "cpu", "2", listed, folder, WORKER]
    done = warm.run(
        [sys.executable, *map(str, command)],
        env={name: value for name, value in os.environ.items() if not name.startswith("LMCORE")},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CASES)
def test_loss_is_every_ranks(name: str, found: Any) -> None:
    """All layouts give the same mean, and so do their ranks."""
    wanted = found["dp"][0]["whole"]
    assert [one["whole"] for one in found[name]] == pytest.approx([wanted] * 2, rel=5e-7)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_receives_a_stop_signal(name: str, found: Any) -> None:
    """All ranks stop before the same batch, and none waits in a collective of a layer."""
    assert [one["stopped"] for one in found[name]] == [True, True]
    assert [one["asked"] for one in found[name]] == [3, 3]


@pytest.mark.parametrize("name", CASES)
def test_not_finite_on_one(name: str, found: Any) -> None:
    """NaN that the last stage alone sees is an error of all; who saw it names the sample."""
    words = [one["nan"] for one in found[name]]
    assert all("validation loss" in text for text in words)
    assert words[-1].startswith("the validation loss is nan at validation sample ")
