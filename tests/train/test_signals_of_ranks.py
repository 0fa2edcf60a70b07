"""Signals to the launcher, to one rank, or to all processes of a run."""

from __future__ import annotations

import signal
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

SENT = {
    "step": ("lmcore.train.step_queue", "StepQueue.submit", 3),
    "start": ("lmcore.train.run", "connect_processes", 1),
}
FLAGS = "--nproc-per-node 2 --train-iters 100000 --lr-decay-iters 100000"
CASES = [
    (target, number)
    for target in ("launcher", "rank", "all")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
]
FAST = ("rank", signal.SIGUSR1)


def sending(when: str, target: str, number: signal.Signals) -> str:
    """Return code by which rank 1 sends a signal at a call of a function."""
    module, name, call = SENT[when]
    return f"""
import os, signal, sys
def send():
    parent = os.getppid()
    with open(f"/proc/{{parent}}/task/{{parent}}/children") as stream:
        every = [parent, *map(int, stream.read().split())]
    for pid in {{"launcher": [parent], "rank": [os.getpid()], "all": every}}[{target!r}]:
        os.kill(pid, {int(number)})
def patch():
    if "torch" not in sys.modules or os.environ.get("RANK") == "0":
        return
    import importlib
    owner = importlib.import_module({module!r})
    *owners, name = {name!r}.split(".")
    for part in owners:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), []
    def call(*arguments, **named):
        calls.append(1)
        if os.environ.get("RANK") == "1" and len(calls) == {call}:
            send()
        return original(*arguments, **named)
    setattr(owner, name, call)
os.register_at_fork(after_in_child=patch)
"""


@pytest.mark.parametrize(
    "target, number",
    [pytest.param(*case, marks=() if case == FAST else pytest.mark.full) for case in CASES],
)
def test_before_the_first_step(
    start: Any, finish: Any, target: str, number: signal.Signals
) -> None:
    """All processes end at once, with the status of a shell, and leave no directory."""
    run = finish(start("run", FLAGS, before=sending("start", target, number)), "run")
    assert run.status == 128 + number, run.err
    word = "terminated" if number == signal.SIGTERM else f"terminated by {number.name}"
    assert run.err.splitlines()[-1] == word
    assert "error" not in run.err
    assert not run.directory.exists()


@pytest.mark.parametrize(
    "target, number",
    [pytest.param(*case, marks=() if case == FAST else pytest.mark.full) for case in CASES],
)
def test_in_a_step(start: Any, finish: Any, target: str, number: signal.Signals) -> None:
    """The step is finished on all ranks and saved; a signal that comes by two ways is one."""
    run = finish(start("run", FLAGS, before=sending("step", target, number)), "run")
    assert run.status == 0, run.err
    assert run.summary["status"] == f"received {number.name}"
    assert run.saved(run.summary["iteration"])
