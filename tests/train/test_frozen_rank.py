"""A rank that is stopped while the others work: the run ends in time, and says which and where."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

SECONDS = 4.0
TIMEOUT = f"--distributed-timeout-minutes {SECONDS / 60}"
PLACES = {
    "step": ("lmcore.train.step_queue", "StepQueue", "submit"),
    "evaluation": ("lmcore.train.validation", "Evaluator", "validate"),
    "save": ("lmcore.checkpoint.save", "_Save", "write"),
}


LAYOUTS = {
    "data": "",
    "tensor": "--tensor-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2 --global-batch-size 8",
}


def stopping(place: str, rank: int, call: int = 3, do: str = "os.kill(os.getpid(), 19)") -> str:
    """Return code by which *rank* stops itself at its *call*-th call of a method."""
    module, owner, method = PLACES[place]
    return f"""
import os, sys, time
def patch():
    if "torch" not in sys.modules:  # not loaded in this process: it is no rank
        return
    import importlib
    from lmcore.runtime.process import join, watch
    join.FAILURE_SECONDS, watch._STACK_SECONDS = 0.5, 1.0  # waited in full
    owner = importlib.import_module({module!r}).{owner}
    original, calls = owner.{method}, []
    def stopped(*arguments, **named):
        calls.append(1)
        if os.environ.get("RANK") == "{rank}" and len(calls) == {call}:
            open("stopped", "w").close()
            {do}
        return original(*arguments, **named)
    owner.{method} = stopped
os.register_at_fork(after_in_child=patch)
"""


FLAGS = f"--nproc-per-node 2 --train-iters 8 --save-interval 1 --eval-interval 1 {TIMEOUT}"
FLAGS += " --split 8,2,0 --eval-iters 1"
CASES = [(place, rank, layout) for place in PLACES for rank in (0, 1) for layout in LAYOUTS]
FAST = ("step", 0, "data")


@pytest.mark.parametrize(
    "place, rank, layout",
    [pytest.param(*case, marks=() if case == FAST else pytest.mark.full) for case in CASES],
)
def test_the_run_ends_and_names_the_stopped_rank(
    start: Any, finish: Any, tmp_path: Path, place: str, rank: int, layout: str
) -> None:
    """Also if it is rank 0; the other rank's stack shows where it waited, and in which op."""
    flags = f"{FLAGS} {LAYOUTS[layout]}"
    run = finish(start("frozen", flags, before=stopping(place, rank)), "frozen")
    assert time.time() - (tmp_path / "stopped").stat().st_mtime < SECONDS + 45  # a busy machine
    other = 1 - rank
    err = run.err.replace("[rank 1] ", "")
    assert run.status == 1
    assert f"rank {rank}: stopped by a signal" in err
    assert f"rank {other}:\n" in err
    assert f"rank {rank}:\n  no answer" in err
    assert "main thread" in err
    assert f"from rank {other} of 2" in err
    assert "step" in err
    if f"rank {rank} did not answer within {SECONDS:g} s" in err:
        assert place == "save"
        return
    message = (
        f"no answer from rank {rank}: a collective of rank {other} did not end within {SECONDS:g} s"
    )
    assert f"error: {message}\n" in err
    assert f"no answer from rank {rank}" in err
    # The launcher writes it if rank 0 is the stopped one.
    who = "" if rank == 1 else "rank 1: "
    assert run.summary["status"] == f"failed: {who}{message}"
    # Rank 0 has counted the step that it validates, and has not yet written its row.
    unwritten = place == "evaluation" and rank == 1
    assert run.summary["iteration"] == run.rows[-1]["step"] + unwritten
    if layout == "pipeline" and place == "step":
        assert f"rank {other}: last seen at send or receive #" in err
    else:
        assert re.search(rf"rank {other}: in `all_\w+` #\d+ of group \w+ \(float32 \[", err)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["data", "tensor"])
def test_a_rank_that_hangs_in_python(start: Any, finish: Any, layout: str) -> None:
    """It shows its stack, and the last collective that it has begun."""
    flags = f"{FLAGS} {LAYOUTS[layout]}"
    run = finish(start("frozen", flags, before=stopping("step", 1, do="time.sleep(600)")), "frozen")
    err = run.err.replace("[rank 1] ", "")
    assert run.status == 1
    waits = re.search(r"rank 0: in `(\w+)` #(\d+) of group (\w+)", err)
    lags = re.search(r"rank 1: has not begun it; its last one is `\w+` #(\d+)", err)
    assert waits is not None, err
    assert lags is not None, err
    assert int(lags[1]) == int(waits[2]) - 1
    assert "stopped (<string>, line" in err


@pytest.mark.full
def test_a_frozen_rank_0_with_the_store(arguments: Any, signal_after: Any, tmp_path: Path) -> None:
    """Under another launcher rank 0 has the store: the others end without its answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    workers = []
    for rank in range(2):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(free_port)
        flags = f"--train-iters 2000 --log-interval 1000 --progress plain {TIMEOUT}"
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "lmcore", *arguments("frozen", flags)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        signal_after(workers[0], tmp_path / "frozen", 2, signal.SIGSTOP)
        _, err = workers[1].communicate(timeout=100)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert workers[1].returncode == 1
    assert "rank 0, which has the store of the run, does not answer" in err
