"""A rank that is stopped while the others work: the run ends in time, and says which and where."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

TIMEOUT = "--distributed-timeout-minutes 0.1"
PLACES = {
    "step": ("lmcore.train.step_queue", "StepQueue", "submit"),
    "evaluation": ("lmcore.train.validation", "Evaluator", "validate"),
    "save": ("lmcore.checkpoint.save", "_Save", "write"),
}


def stopping(place: str, rank: int, call: int = 3) -> str:
    """Return code by which *rank* stops itself at its *call*-th call of a method."""
    module, owner, method = PLACES[place]
    return f"""
import os, signal, sys
def patch():
    if "torch" not in sys.modules:  # not loaded in this process: it is no rank
        return
    import importlib
    owner = importlib.import_module({module!r}).{owner}
    original, calls = owner.{method}, []
    def stopped(*arguments, **named):
        calls.append(1)
        if os.environ.get("RANK") == "{rank}" and len(calls) == {call}:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments, **named)
    owner.{method} = stopped
os.register_at_fork(after_in_child=patch)
"""


FULL = [("step", 1), ("evaluation", 0), ("evaluation", 1), ("save", 0), ("save", 1)]


@pytest.mark.parametrize(
    "place, rank",
    [("step", 0), *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_the_run_ends_and_names_the_stopped_rank(
    start: Any, finish: Any, place: str, rank: int
) -> None:
    """Also if it is rank 0; the other rank's stack shows where it waited."""
    flags = f"--nproc-per-node 2 --train-iters 8 --save-interval 1 --eval-interval 1 {TIMEOUT}"
    flags += " --split 8,2,0 --eval-iters 1"
    began = time.monotonic()
    run = finish(start("frozen", flags, before=stopping(place, rank)), "frozen")
    assert time.monotonic() - began < 100  # it hung for ever
    other = 1 - rank
    assert run.status == 1
    assert f"rank {rank}: stopped by a signal" in run.err
    assert f"rank {other}:\n" in run.err.replace("[rank 1] ", "")
    assert f"rank {rank}:\n  no answer" in run.err.replace("[rank 1] ", "")
    assert "main thread" in run.err
    assert f"from rank {other} of 2" in run.err
    if place == "save":
        assert f"rank {rank} did not answer within 6 s" in run.err
    else:
        assert f"a collective of rank {other} did not end within 6 s" in run.err
        assert f"no answer from rank {rank}" in run.err
    assert "step" in run.err


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
