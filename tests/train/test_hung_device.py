"""Runs in which a call of the device never returns: each ends in limited time when it has to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from suite.warm import WarmPopen

CALL_MAIN = "import sys\nfrom lmcore.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
STOP = ("--stop-timeout-minutes", "0.02")
FLAGS = f"--train-iters 9 --save-interval 2 {' '.join(STOP)}"

HANG_FUNCTION = """
import ctypes, os

def hang():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call never returns; no signal interrupts it
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
HANG = f"""{HANG_FUNCTION}
from lmcore.train.step import TrainStep

take_step = TrainStep.__call__

def call(step, *arguments):
    if step.state.iteration == 3 and os.environ.get("RANK", "0") == os.environ["HANGS_ON"]:
        if "HUNG" in os.environ:
            open(os.environ["HUNG"], "w").close()
        hang()
    return take_step(step, *arguments)

TrainStep.__call__ = call
"""
HANG_AT_BOUNDARY = f"""{HANG_FUNCTION}
import dataclasses, itertools
from lmcore_cpu import device as cpu

create, calls = cpu.create_device, itertools.count(1)

def boundary():
    if next(calls) == int(os.environ["HANGS_AT"]):
        print("hangs", flush=True)
        hang()

cpu.create_device = lambda settings: dataclasses.replace(create(settings), step_boundary=boundary)
"""


def wait_for(file: Path, process: Any) -> None:
    """Wait until the device hangs: an earlier signal would end the run after the third step."""
    end = time.monotonic() + 60
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_signal_ends_a_run_on_a_hung_device(start: Any, finish: Any, tmp_path: Path) -> None:
    """The error has step and call, the summary the failure; the last line continues the run."""
    hung = tmp_path / "hung"
    process = start("run", FLAGS, env={"HANGS_ON": "0", "HUNG": str(hung)}, before=HANG)
    wait_for(hung, process)
    process.send_signal(signal.SIGTERM)
    run = finish(process, "run")
    assert run.status == 143
    what = "step 4 on `cpu` did not end within 1.2 seconds of SIGTERM"
    assert f"error: {what}" in run.err
    assert "hang (<string>, line " in run.err
    assert run.err.splitlines()[-1].startswith("to continue from step 2: `lmcore train --continue")
    assert run.summary["status"] == f"failed: {what}"
    assert run.summary["iteration"] == 3


def read_until(process: Any, word: str) -> None:
    """Read the output of a process up to a line, and give it time for the call that follows."""
    for line in process.stdout:
        if line == f"{word}\n":
            time.sleep(0.5)
            return
    raise AssertionError(process.communicate())


def test_a_step_boundary_that_hangs(start: Any, finish: Any) -> None:
    """The program that a lazy device runs in the fourth step does not come back."""
    process = start("run", FLAGS, env={"HANGS_AT": "8"}, before=HANG_AT_BOUNDARY)
    read_until(process, "hangs")
    process.send_signal(signal.SIGTERM)
    run = finish(process, "run")
    assert run.status == 143
    assert "error: step 4 on `cpu` did not end within 1.2 seconds of SIGTERM" in run.err
    assert "boundary (<string>, line " in run.err


@pytest.mark.parametrize("number,status", [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_text_generation_on_a_hung_device(train: Any, number: signal.Signals, status: int) -> None:
    """Ctrl-C ends it by the limit; SIGTERM, which the command does not handle, at once."""
    directory = train("run", "--train-iters 1").directory
    words = ["generate", "--load", str(directory), "--prompt", "A", "--device", "cpu"]
    process = WarmPopen(
        [sys.executable, "-c", HANG_AT_BOUNDARY + CALL_MAIN, *words, *STOP],
        env={**os.environ, "HANGS_AT": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    read_until(process, "hangs")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    what = "error: generation on `cpu` did not end within 1.2 seconds of SIGINT"
    assert (what in err) == (number == signal.SIGINT)


LOOP = """
import lmcore, torch

with lmcore.start(device="cpu", precision="fp32", stop_timeout_minutes=0.02) as rt:
    model = torch.nn.Linear(2, 2)
    model, optimizer = rt.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(9):
        rt.backward(model(torch.ones(1, 2)).sum())
        rt.step(optimizer)
"""


def test_a_loop_of_the_library_on_a_hung_device() -> None:
    """Ctrl-C is handled by Python, which a hung call never returns to."""
    process = WarmPopen(
        [sys.executable, "-c", HANG_AT_BOUNDARY + LOOP],
        env={**os.environ, "HANGS_AT": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    read_until(process, "hangs")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "error: update 2 on `cpu` did not end within 1.2 seconds of SIGINT" in err
    assert "`stop_timeout_minutes` changes the limit" in err


@pytest.mark.distributed
def test_one_hung_rank_ends_all(start: Any, finish: Any, tmp_path: Path) -> None:
    """The launcher passes the signal on; the rank that hangs ends, and so does the waiting one."""
    hung = tmp_path / "hung"
    env = {"HANGS_ON": "1", "HUNG": str(hung)}
    process = start("run", f"{FLAGS} --nproc-per-node 2", env=env, before=HANG)
    wait_for(hung, process)
    process.send_signal(signal.SIGTERM)
    run = finish(process, "run")
    assert run.status == 143
    assert "step 4 on `cpu` did not end within 1.2 seconds of SIGTERM" in run.err
    assert "to continue from step 2" in run.err.splitlines()[-1]


@pytest.mark.distributed
def test_a_failed_rank_ends_a_hung_one(as_ranks: Any, monkeypatch: Any) -> None:
    """Without lmcore's launcher, which would kill it, a rank ends by its own limit."""
    monkeypatch.setenv("HANGS_ON", "1")
    fail = """
def fail(step, *arguments):
    if step.state.iteration == 3 and os.environ["RANK"] == "0":
        raise RuntimeError("rank 0 fails")
    return call(step, *arguments)

TrainStep.__call__ = fail
"""
    script = ["-c", HANG + fail + CALL_MAIN]
    run = as_ranks("run", FLAGS, [script, script])
    assert run.status == 1
    assert "RuntimeError: rank 0 fails" in run.err


def test_a_failed_run_on_a_hung_device_ends(start: Any, finish: Any) -> None:
    """Code that runs after the error uses the device, too; the message has the error."""
    fail = """
from lmcore.train.report import run_report

def fail(step, *arguments):
    if step.state.iteration == 3:
        raise RuntimeError("rank 0 fails")
    return take_step(step, *arguments)

TrainStep.__call__ = fail
run_report.run_end = lambda *_: hang()
"""
    run = finish(start("run", FLAGS, before=HANG + fail), "run")
    assert run.status == 1
    why = "within 1.2 seconds of its end (failed: RuntimeError: rank 0 fails)"
    assert f"error: step 4 on `cpu` did not end {why}" in run.err
    assert run.err.splitlines()[-1].startswith("to continue from step 2: `lmcore train --continue")
    assert run.summary["status"].endswith(why)
