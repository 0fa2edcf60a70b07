"""Runs of several processes: equal to one process, continued, interrupted, killed, refused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from suite import warm

pytestmark = pytest.mark.distributed

CLOSE = 2e-6
"""Relative: a sum of eight float32 losses or gradients in another order differs by a tenth."""


@pytest.fixture
def many(start: Any, finish: Any) -> Any:
    """Trains on several processes and returns the run."""

    def go(name: str, flags: str, size: int = 2, **env: str) -> Any:
        return finish(start(name, f"--nproc-per-node {size} {flags}", env=env), name)

    return go


def curve(run: Any) -> list[float]:
    """Return every loss, validation loss and gradient norm."""
    assert run.status == 0, run.err
    names = ("loss", "grad_norm", "valid_loss")
    return [row[name] for row in run.rows for name in names if name in row]


def assert_same_weights(one: Any, two: Any, *, tolerance: float) -> None:
    found, wanted = one.saved(), two.saved()
    for name in wanted:
        if name.startswith("model."):
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "size, flags",
    [
        (2, "--micro-batch-size 4"),
        (2, "--micro-batch-size 1"),
        pytest.param(4, "--micro-batch-size 2", marks=pytest.mark.full),
        pytest.param(2, "--micro-batch-size 2 --recompute full", marks=pytest.mark.full),
        (2, "--micro-batch-size 2 --async-save"),
    ],
)
def test_equal_to_one_process(train_once: Any, many: Any, size: int, flags: str) -> None:
    """Losses, validation losses, gradient norms and the last weights match one process."""
    common = "--global-batch-size 8 --train-iters 6 --eval-interval 3 --eval-iters 2 --split 8,2,0"
    alone = train_once(f"{common} --micro-batch-size 8")
    together = many("together", f"{common} {flags}", size)
    assert curve(together) == pytest.approx(curve(alone), rel=CLOSE)
    assert [row["consumed_samples"] for row in together.rows] == [8, 16, 24, 32, 40, 48]
    assert_same_weights(together, alone, tolerance=2e-5)
    assert together.summary["status"] == "completed"
    environment = json.loads((together.directory / "environment.json").read_text())
    assert environment["comm_backend"] == {"name": "gloo", "plugin": "cpu"}
    assert environment["plugins"][0]["brings"]["comm_backend"] == "gloo"


@pytest.mark.full  # compiling takes most of the time, and `test_compile.py` does it alone
@pytest.mark.timeout(300)  # both processes compile at once
def test_compiled(train: Any, many: Any) -> None:
    """Blocks that are compiled exchange their gradients just as well."""
    common = "--global-batch-size 8 --train-iters 3 --num-layers 1"
    alone = train("alone", f"{common} --micro-batch-size 8")
    together = many("together", f"{common} --micro-batch-size 4 --compile")
    assert curve(together) == pytest.approx(curve(alone), rel=2e-5)


def test_every_process_draws_its_own_dropout(many: Any) -> None:
    """Masks differ between processes, and a run that continues draws the very same ones."""
    flags = "--train-iters 6 --hidden-dropout 0.2 --attention-dropout 0.1"
    whole = many("whole", flags)
    first = many("parts", f"{flags} --exit-interval 3")
    states = first.saved(3)
    assert not torch.equal(states["rng.device"], states["rng.rank1.device"])
    more = many("parts", f"{flags} --load {first.directory}")
    assert more.status == 0, more.err
    assert more.curve() == whole.curve()
    one, two = whole.saved(6), more.saved(6)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_continued_on_another_number_of_processes(train: Any, many: Any) -> None:
    """The samples come in the same order, whatever the number of processes before and after."""
    flags = "--global-batch-size 8 --train-iters 9"
    alone = train("alone", f"{flags} --micro-batch-size 8")
    many("parts", f"{flags} --micro-batch-size 4 --exit-interval 3")
    more = train("parts", f"{flags} --exit-interval 6 --load {alone.directory.parent / 'parts'}")
    assert more.status == 0, more.err
    last = many("parts", f"{flags} --micro-batch-size 2 --load {more.directory}", 4)
    assert curve(last) == pytest.approx(curve(alone), rel=2e-5)


def test_under_torchrun(train: Any, arguments: Any, tmp_path: Path) -> None:
    """A launcher's processes train together, and one of them reports."""
    alone = train("alone", "--global-batch-size 8 --micro-batch-size 8 --train-iters 3")
    flags = "--global-batch-size 8 --micro-batch-size 4 --train-iters 3 --nproc-per-node 2"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = warm.run(
        [*command, "--nproc-per-node", "2", "-m", "lmcore", *arguments("run", flags)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run directory") == 1
    assert alone.rows[-1]["loss"] == pytest.approx(_rows(tmp_path / "run")[-1]["loss"], rel=CLOSE)


def test_a_launcher_decides_how_many(start: Any, finish: Any) -> None:
    """`--nproc-per-node` may only repeat what a launcher has done."""
    env = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    run = finish(start("run", "--nproc-per-node 3", env=env), "run")
    assert run.status == 2
    assert "`--nproc-per-node 3`: a launcher started 2 here" in run.err


def test_told_once_to_end(start: Any, finish: Any, signal_after: Any, tmp_path: Path) -> None:
    """SIGTERM to the launcher ends all processes at one step; the run saves and can continue."""
    flags = "--train-iters 100000 --lr-decay-iters 100000 --nproc-per-node 2"
    process = start("run", flags)
    signal_after(process, tmp_path / "run", 3, signal.SIGTERM)
    run = finish(process, "run")
    assert run.status == 0, run.err
    assert run.summary["status"] == "received SIGTERM"
    step = run.summary["iteration"]
    assert run.saved(step)


def test_settings_that_differ(start: Any, finish: Any) -> None:
    """Processes that were given different settings stop, and every one says what differs."""
    port = _free_port()
    processes = []
    for rank, rate in enumerate(("1e-3", "2e-3")):
        place = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        env = {**place, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(start(f"run{rank}", f"--train-iters 2 --lr {rate}", env=env))
    for rank, process in enumerate(processes):
        run = finish(process, f"run{rank}")
        assert run.status == 1
        assert "the processes of this run differ in their settings" in run.err
        assert "lr:\n       rank 0: 0.001\n       rank 1: 0.002" in run.err


def test_a_killed_process_ends_the_run(start: Any, finish: Any, tmp_path: Path) -> None:
    """The launcher names the rank and the signal, ends the others, and leaves nothing behind."""
    process = start("run", "--train-iters 100000 --lr-decay-iters 100000 --nproc-per-node 2")
    workers = _workers_in_training(process, tmp_path / "run")
    os.kill(workers[1], signal.SIGKILL)
    run = finish(process, "run")
    assert run.status == 1
    assert "error: rank 1 of 2 was killed by SIGKILL" in run.err
    assert re.search(r"from rank 1 of 2\n  rank 0: ", run.err)
    assert run.err.count("error:") == 1, run.err
    assert not any(_alive(worker) for worker in workers)
    if (tmp_path / "run/summary.json").exists():  # rank 0 may be ended before it writes
        assert run.summary["status"] == "failed: rank 1 of 2 was killed by SIGKILL"


def test_processes_end_with_their_launcher(start: Any, tmp_path: Path) -> None:
    """No process survives a launcher that is killed."""
    process = start("run", "--train-iters 100000 --lr-decay-iters 100000 --nproc-per-node 2")
    workers = _workers_in_training(process, tmp_path / "run")
    process.kill()
    end = time.monotonic() + 20
    while any(_alive(worker) for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_failure_is_reported_once(many: Any, tmp_path: Path) -> None:
    """A loss that is not finite in both processes is one error; nothing is saved."""
    run = many("run", "--train-iters 50 --lr 1e30 --clip-grad 0 --lr-decay-style constant")
    assert run.status == 1
    assert run.err.count("error:") == 1, run.err
    assert "all 2 ranks report the same error" in run.err
    assert not list((tmp_path / "run/checkpoints").glob("iter_*"))
    assert run.summary["status"].startswith("failed: ")


def test_batches_that_do_not_divide(many: Any) -> None:
    """The launcher checks the settings for all of them, before it starts any."""
    run = many("run", "--global-batch-size 6 --micro-batch-size 2")
    assert run.status == 2
    assert "times data parallel size (2)" in run.err
    assert "rank" not in run.err


def _rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def _workers_in_training(process: Any, directory: Path) -> list[int]:
    """Return the process ids of the ranks, in their order, once steps are taken."""
    metrics = directory / "metrics.jsonl"
    end = time.monotonic() + 60
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = [int(word) for word in path.read_text().split()]
    assert len(found) == 2
    return sorted(found, key=lambda pid: b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
