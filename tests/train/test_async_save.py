"""Runs whose checkpoints are written during training: the same checkpoints, and nothing lost."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import find_checkpoint, verify_checkpoint
from lmcore.contract.transfer import staging_buffers as host_copies
from lmcore.optim.adamw import AdamW
from lmcore.optim.optimizer import Optimizer
from lmcore.train.resume import save as saving
from lmcore.train.resume.save import WRITER_NAME, Snapshot

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"

LAST = 11
LATER = 2
"""Steps that are taken while a checkpoint is written."""


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes a write in the background wait for later steps; notes the threads that write."""
    writers: list[str] = []
    plain = saving.save_checkpoint

    def slow(directory: Path, iteration: int, *args: Any, **options: Any) -> Path:
        writers.append(threading.current_thread().name)
        end = time.monotonic() + 60
        while writers[-1] == WRITER_NAME and not _taken(directory.parent, iteration + LATER):
            assert time.monotonic() < end, "no step was taken during the write"
            time.sleep(0.005)
        return plain(directory, iteration, *args, **options)

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    return writers


def _taken(run: Path, step: int) -> bool:
    """Return whether a run has taken a step, or its last one."""
    return (run / "metrics.jsonl").read_bytes().count(b"\n") >= min(step, LAST)


def test_same_checkpoints(train: Any, assert_same: Any, slow_disk: list[str]) -> None:
    """Steps taken during a slow write are in no checkpoint before their own, bit for bit."""
    flags = f"--train-iters {LAST} --save-interval 4 {DROPOUT}"
    plain = train("plain", flags)
    assert WRITER_NAME not in slow_disk
    slow_disk.clear()
    behind = train("behind", f"{flags} --async-save")
    assert behind.status == 0, behind.err
    assert slow_disk == [WRITER_NAME] * 3
    assert behind.curve() == plain.curve()
    for step in (4, 8, LAST):
        assert_same(behind.saved(step), plain.saved(step))
    assert behind.summary["checkpoint"].endswith("iter_0000011")
    assert WRITER_NAME not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keeps the writer from copying until the next step was taken; notes the saves that it copies.

    Of the tensors of such a small model none is copied by the save itself.
    """
    monkeypatch.setattr(host_copies, "_SMALLEST_BYTES", 0)
    late: list[int] = []
    written: list[int] = []
    plain = Snapshot.write
    plain_copy = host_copies.copy_piece

    def slow(snapshot: Snapshot) -> Path:
        end = time.monotonic() + 60
        while not _taken(snapshot.directory.parent, snapshot.iteration + 1):
            assert time.monotonic() < end, "no step was taken before the copy"
            time.sleep(0.005)
        written.append(snapshot.iteration)
        return plain(snapshot)

    def copy(source: Any, target: Any) -> None:
        if threading.current_thread().name == WRITER_NAME:
            late.append(written[-1])
        plain_copy(source, target)

    monkeypatch.setattr(Snapshot, "write", slow)
    monkeypatch.setattr(host_copies, "copy_piece", copy)
    return late


VALID = "--split 8,1,1 --eval-iters 1"
SOPHIA = "--optimizer sophia --sophiag-hessian-interval 3"
ENGINES = {
    "adam": f"--global-batch-size 8 {VALID} --eval-interval 2 --save-interval 3",
    "averaged": f"--optimizer schedulefree {VALID} --eval-interval 4 --save-interval 4",
    "hessian": f"{SOPHIA} --save-interval 3",
    "imported": "--optimizer torch.optim:NAdam --save-interval 4",
    "best": f"--save-best {VALID} --eval-interval 1 --save-interval 1",
}


@pytest.mark.parametrize("flags", ENGINES.values(), ids=ENGINES.keys())
def test_updates_wait_for_the_copy(
    train: Any,
    assert_same: Any,
    flags: str,
    request: pytest.FixtureRequest,
) -> None:
    """A copy that begins after the end of the next step still has the earlier step's values."""
    flags = f"--train-iters {LAST} {DROPOUT} {flags}"
    plain = train("plain", flags)
    late = request.getfixturevalue("slow_copy")
    behind = train("behind", f"{flags} --async-save")
    assert behind.status == 0, behind.err
    assert behind.curve() == plain.curve()
    checkpoints = sorted((plain.directory / "checkpoints").glob("iter_*"))
    assert len(checkpoints) >= 3
    for checkpoint in checkpoints:
        step = int(checkpoint.name[5:])
        assert_same(behind.saved(step), plain.saved(step))
    assert set(late) <= {LAST}  # after the last step nothing ends the copy but the writer


def test_a_step_that_does_not_wait(
    train: Any, slow_copy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait the save fails: a checkpoint never has the numbers of two steps."""
    monkeypatch.setattr(Optimizer, "_begin_change", lambda optimizer: None)
    run = train("run", f"--train-iters {LAST} --save-interval 4 --async-save")
    assert run.status == 1
    assert "changed while it was copied for a checkpoint" in run.err
    assert "Traceback" not in run.err
    assert not list((run.directory / "checkpoints").glob("*"))


def test_failed_copy(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails ends the run at a later step with its message; nothing is published."""
    monkeypatch.setattr(host_copies, "_SMALLEST_BYTES", 0)

    def fail(source: Any, target: Any) -> None:
        raise MemoryError("no page is left")

    monkeypatch.setattr(host_copies, "copy_piece", fail)
    run = train("run", "--optimizer sgd --train-iters 400 --save-interval 3 --async-save")
    assert run.status == 1
    assert "could not save the checkpoint of iteration 3" in run.err
    assert "its tensors could not be copied to the host: no page is left" in run.err
    assert "Traceback" not in run.err
    assert 3 <= len(run.rows) <= 6
    assert not list((run.directory / "checkpoints").glob("*"))


def test_weights_that_are_not_finite(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes finds them and ends the run at a later step; earlier ones stay."""
    plain, calls = AdamW._step, []

    def spoil(optimizer: AdamW, lr: float) -> None:
        plain(optimizer, lr)
        calls.append("step")
        if calls.count("step") == 6:  # a row of padding, which no loss depends on
            with torch.no_grad():
                optimizer.groups[0].parameters[0].data[-1, 0] = torch.inf

    prepare = AdamW.prepare_release
    monkeypatch.setattr(AdamW, "_step", spoil)
    monkeypatch.setattr(
        AdamW, "prepare_release", lambda self: (calls.append("prepare"), prepare(self))[1]
    )
    run = train("run", "--train-iters 400 --save-interval 3 --async-save")
    assert run.status == 1
    assert calls[0] == "prepare"  # of memory, not in a step
    assert "weights are not finite after step 6: `token_embedding.weight`" in run.err
    assert "Traceback" not in run.err
    assert "iter_0000006" not in run.err
    last = run.err.strip().splitlines()[-1]
    assert last == f"to continue from step 3: `lmcore train --continue {run.directory}`"
    assert 6 <= len(run.rows) <= 9
    assert [path.name for path in (run.directory / "checkpoints").glob("*iter_*")] == [
        "iter_0000003"
    ]


def test_resume_from_it(train: Any, assert_same: Any) -> None:
    """A run continues from a checkpoint that was written behind its back as if it had not been."""
    flags = f"--train-iters 12 --save-interval 3 {DROPOUT} --async-save"
    whole = train("whole", flags)
    part = train("part", f"{flags} --exit-interval 6")
    part = train("part", f"{flags} --load {part.directory}")
    assert part.status == 0, part.err
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())


def test_failed_write(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails ends the run at a later step with its message; earlier ones are there."""
    plain = saving.save_checkpoint

    def full(directory: Path, iteration: int, *args: Any, **options: Any) -> Path:
        if iteration == 6:
            raise CheckpointError("could not save the checkpoint of iteration 6", why="no space")
        return plain(directory, iteration, *args, **options)

    monkeypatch.setattr(saving, "save_checkpoint", full)
    run = train("run", "--optimizer sgd --train-iters 400 --save-interval 3 --async-save")
    assert run.status == 1
    assert "could not save the checkpoint of iteration 6" in run.err
    assert "Traceback" not in run.err
    assert 6 <= len(run.rows) <= 9
    assert run.summary["status"].startswith("failed: could not save")
    assert [path.name for path in (run.directory / "checkpoints").glob("iter_*")] == [
        "iter_0000003"
    ]


def test_terminated_run(
    start: Any, finish: Any, signal_after: Any, train: Any, assert_same: Any, tmp_path: Any
) -> None:
    """SIGTERM amid background writes saves, waits and exits with 0; every checkpoint is whole."""
    flags = f"--train-iters 2000 {DROPOUT} --lr-decay-iters 2000"
    process = start("part", f"{flags} --save-interval 2 --keep-last 3 --async-save")
    signal_after(process, tmp_path / "part", 7, signal.SIGTERM)
    stopped = finish(process, "part")
    assert stopped.status == 0, stopped.err
    step = stopped.summary["iteration"]
    checkpoints = stopped.directory / "checkpoints"
    assert find_checkpoint(stopped.directory).name == f"iter_{step:07d}"
    for path in checkpoints.glob("iter_*"):
        verify_checkpoint(path)
    assert not list(checkpoints.glob(".*"))
    whole = train("whole", f"{flags} --exit-interval {step}")
    assert_same(stopped.saved(), whole.saved())


def test_killed_run(start: Any, finish: Any, signal_after: Any, train: Any, tmp_path: Any) -> None:
    """A run that is killed amid a write leaves whole checkpoints, and continues from the last."""
    flags = f"--train-iters 2000 {DROPOUT} --lr-decay-iters 2000 --save-interval 1 --async-save"
    process = start("run", f"{flags} --keep-last 2")
    signal_after(process, tmp_path / "run", 9, signal.SIGKILL)
    killed = finish(process, "run")
    assert killed.status == -signal.SIGKILL
    found = sorted((killed.directory / "checkpoints").glob("iter_*"))
    assert found
    for path in found:
        verify_checkpoint(path)
    step = int(found[-1].name[5:])
    more = train("run", f"{flags} --exit-interval {step + 2} --load {killed.directory}")
    assert more.status == 0, more.err
    assert more.rows[-1]["step"] >= step + 1
