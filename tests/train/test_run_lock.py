"""Two runs and one directory: the second ends at once, unless the first is dead."""

from __future__ import annotations

import signal
from typing import Any

import pytest

LONG = "--train-iters 100000 --lr-decay-iters 100000"


def test_a_second_run_is_refused(
    start: Any, finish: Any, signal_after: Any, train: Any, tmp_path: Any
) -> None:
    """It exits with 2 and names the first, whose rows and settings stay; a killed run frees it."""
    directory = tmp_path / "run"
    first = start("run", LONG)
    signal_after(first, directory, 2, signal.SIGCONT)
    config = (directory / "config.yaml").read_bytes()
    for flags in ("--train-iters 3", f"--train-iters 3 --load {directory}"):
        second = train("run", f"{flags} --seed 99")
        assert second.status == 2, second.err
        assert f"another run writes to `{directory}`" in second.err
        assert f"process {first.pid} on " in second.err
    many = finish(start("run", "--train-iters 3 --micro-batch-size 2 --nproc-per-node 2"), "run")
    assert many.status == 2, many.err
    assert f"process {first.pid} on " in many.err
    assert (directory / "config.yaml").read_bytes() == config
    assert not list((directory / "checkpoints").iterdir())
    first.send_signal(signal.SIGTERM)
    ended = finish(first, "run")
    assert ended.status == 0, ended.err
    steps = [row["step"] for row in ended.rows]
    assert steps == list(range(1, len(steps) + 1))
    assert not (directory / "run.lock").exists()


def test_the_lock_of_a_killed_run(
    start: Any, finish: Any, signal_after: Any, train: Any, tmp_path: Any
) -> None:
    """A run whose process was killed does not keep its directory."""
    directory = tmp_path / "run"
    first = start("run", f"{LONG} --save-interval 1 --keep-last 2")
    signal_after(first, directory, 4, signal.SIGKILL)
    finish(first, "run")
    assert (directory / "run.lock").exists()
    second = train("run", f"{LONG} --exit-interval 50 --load {directory}")
    assert second.status == 0, second.err
    assert f"process {first.pid} on " in second.err
    assert "is gone" in second.err
    assert [row["step"] for row in second.rows] == list(range(1, second.rows[-1]["step"] + 1))


@pytest.mark.parametrize("flags", ["--hidden-size 15", "--data-path none-such"])
def test_a_run_that_never_began_leaves_no_lock(train: Any, tmp_path: Any, flags: str) -> None:
    """A run that ends with an error before its first step leaves nothing."""
    assert train("run", f"--train-iters 3 {flags}").status == 2
    assert not (tmp_path / "run").exists()
