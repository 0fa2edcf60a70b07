"""Runs that are killed at random moments and started again: the same run as one without a kill."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lmcore.checkpoint import verify_checkpoint

pytestmark = pytest.mark.full

LAST, KILLS = 30, 4
FLAGS = (
    f"--train-iters {LAST} --eval-interval 4 --eval-iters 2 --split 80,10,10 --sample-tokens 5"
    " --hidden-dropout 0.1 --attention-dropout 0.1"
)
SAVES = (
    "--save-interval 3",
    "--save-interval 2 --async-save",
    "--save-interval 1 --keep-last 2",
    "--save-interval-mins 0.0004",
)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for word in found for each in (int(word), *children(int(word)))]


def wait_for_moment(process: Any, directory: Path, chance: random.Random) -> None:
    """Wait until a random moment of a run: at its start, at a step, in a save, or at its end."""
    kind = chance.choice(["start", "step", "save", "end"])
    step, delay = chance.randint(1, LAST), chance.uniform(0, 0.03)
    metrics, checkpoints = directory / "metrics.jsonl", directory / "checkpoints"
    end = time.monotonic() + (chance.uniform(0, 1.0) if kind == "start" else 30)
    while process.poll() is None and time.monotonic() < end:
        rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if (kind == "step" and rows == step) or (kind == "end" and rows == LAST):
            break
        if kind == "save" and any(checkpoints.glob(".iter_*")):
            break
        time.sleep(0.001)
    time.sleep(delay)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_killed_run(
    start: Any, finish: Any, assert_same: Any, tmp_path: Path, size: int, saves: str
) -> None:
    """After kills of all processes, the launcher or one rank, losses and weights are the same."""
    flags = f"{FLAGS} {saves} --nproc-per-node {size}"
    whole = finish(start("whole", flags), "whole")
    assert whole.status == 0, whole.err
    directory, chance = tmp_path / "run", random.Random(f"{saves} {size}")
    for _ in range(KILLS):
        process = start("run", f"{flags} --load {directory}")
        wait_for_moment(process, directory, chance)
        others = children(process.pid)
        killed = [process.pid, *others]
        if others:
            killed = chance.choice([killed, [process.pid], others[:1], others[-1:]])
        if process.poll() is None:
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        ended = finish(process, "run")
        assert "Traceback" not in ended.err
    run = finish(start("run", f"{flags} --load {directory}"), "run")
    assert run.status == 0, run.err
    assert run.curve() == whole.curve()
    assert_same(run.saved(), whole.saved())
    for name in ("status", "iteration", "loss", "valid_loss", "test_loss", "sample"):
        assert run.summary[name] == whole.summary[name], name
    assert run.summary["checkpoint"].endswith(f"iter_{LAST:07d}")
    for path in (directory / "checkpoints").glob("iter_*"):
        assert verify_checkpoint(path) == []
    assert not list((directory / "checkpoints").glob(".*"))
    assert not (directory / "run.lock").exists()
