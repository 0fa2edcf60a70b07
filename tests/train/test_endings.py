"""Last lines of a run: the command that continues it, its result, and the step before a NaN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suite.warm import WarmPopen

from lmcore.cli.main import main


def test_the_command_that_continues(train: Any, capsys: Any) -> None:
    """A run that ends early prints the command that continues it; the command works."""
    first = train("a run", "--train-iters 6 --exit-interval 3")
    (line,) = [line for line in first.out.splitlines() if line.startswith("continue ")]
    assert line.split(maxsplit=1)[1] == f"lmcore train --continue '{first.directory}'"
    assert main(["train", "--continue", str(first.directory)]) == 0
    assert [row["step"] for row in first.rows] == [1, 2, 3, 4, 5, 6]
    assert "continue  " not in capsys.readouterr().out, "it is complete"


def test_continuing_a_fine_tuned_run(train: Any, train_once: Any) -> None:
    """`--continue` does not begin the fine-tuning again."""
    base = train_once("--train-iters 4")
    flags = f"--train-iters 4 --finetune --load {base.directory} --exit-interval 2 --seed 9"
    tuned = train("tuned", flags)
    assert main(["train", "--continue", str(tuned.directory)]) == 0
    assert [row["step"] for row in tuned.rows] == [1, 2, 3, 4]


def test_a_complete_run_has_nothing_to_continue(train_once: Any) -> None:
    """The line is for runs that ended early."""
    assert "continue " not in train_once("--train-iters 4").out


def test_no_checkpoint_at_the_end(train: Any) -> None:
    """A benchmark saves none, at its end or when it is stopped, and names none."""
    for name, more in (("whole", ""), ("stopped", "--exit-interval 2")):
        run = train(name, f"--train-iters 4 --no-save-final --save-interval-mins 0 {more}")
        assert run.status == 0, run.err
        assert "saving    no checkpoint" in run.err
        assert not list(run.directory.glob("checkpoints/iter_*"))
        assert run.summary["checkpoint"] is None
        assert "lmcore generate" not in run.out
        assert "continue  " not in run.out


def test_checkpoints_beside_the_final_one(train: Any, train_once: Any) -> None:
    """Checkpoints that are asked for are saved, and no others; a loaded one is not copied."""
    base = train_once("--train-iters 4")
    flags = f"--train-iters 7 --schedule extend --load {base.directory} --no-save-final"
    run = train("some", f"{flags} --save-interval 6")
    assert run.status == 0, run.err
    saved = [path.name for path in run.directory.glob("checkpoints/iter_*")]
    assert saved == ["iter_0000006"]
    none = train("none", f"--train-iters 4 --load {base.directory} --no-save-final")
    assert none.status == 0, none.err
    assert not list(none.directory.glob("checkpoints/iter_*"))
    assert "lmcore generate" not in none.out


def test_no_step_updated_the_weights(train: Any) -> None:
    """A short fp16 run whose loss scale still falls is complete, with a warning."""
    flags = "--train-iters 3 --precision fp16 --initial-loss-scale 1e30"
    run = train("run", flags)
    assert run.status == 0, run.err
    assert "0 of 3 steps updated the weights" in run.out
    assert "warning: no step updated the weights: the loss scale began at 1e+30, falls" in run.err
    assert run.summary["status"] == "completed"
    fixed = train("fixed", "--train-iters 3 --precision fp16 --loss-scale 1e30")
    assert fixed.status == 1
    assert "error: no step updated the weights" in fixed.err
    assert fixed.summary["status"] == "failed: no step updated the weights"
    early = train("early", f"{flags} --exit-interval 2")
    assert early.status == 0, "a later session may find a loss scale that fits"
    assert "0 of 2 steps updated the weights" in early.out


def test_some_steps_updated_the_weights(train: Any) -> None:
    """A run with a few skipped steps counts them and is complete."""
    flags = "--train-iters 60 --precision fp16 --initial-loss-scale 1099511627776"
    run = train("run", flags)
    assert run.status == 0, run.err
    skipped = run.summary["skipped_iterations"]
    assert skipped
    assert f"{60 - skipped} of 60 steps updated the weights" in run.out
    assert run.summary["status"] == "completed"


def test_advice_after_nan(train: Any) -> None:
    """The error names the checkpoint to continue from, only if there is one."""
    flags = "--train-iters 9 --lr 1e30 --clip-grad 0 --lr-warmup-fraction 0"
    fresh = train("fresh", flags)
    assert fresh.status == 1
    assert "continue from" not in fresh.err
    base = train("base", "--train-iters 9 --exit-interval 2")
    later = train(
        "base", f"{flags} --load {base.directory} --override-opt-param-scheduler --exit-interval 9"
    )
    assert later.status == 1, later.err
    assert f"to continue from step 2: `lmcore train --continue {base.directory}`" in later.err
    other = train("other", f"{flags} --load {base.directory} --override-opt-param-scheduler")
    assert other.status == 1, other.err
    assert f"continue from `{base.directory}/checkpoints/iter_0000002`" in other.err


def test_the_last_line_of_a_run_that_ends_early(train: Any) -> None:
    """Steps after the last training line, or before the first one, have a line at the end."""
    flags = "--train-iters 9 --exit-interval 5"
    for interval, shown in ((3, [3, 5]), (5, [5]), (100, [5])):
        run = train(f"every {interval}", f"{flags} --log-interval {interval}")
        lines = [line for line in run.err.splitlines() if line.startswith(" iteration ")]
        assert [int(line.split()[1].rstrip("/")) for line in lines] == shown
        since = run.rows[shown[-2] if len(shown) > 1 else 0 : 5]
        mean = sum(row["loss"] for row in since) / len(since)
        assert f"lm loss: {mean:.6E}" in lines[-1]


def test_a_run_of_one_step(train: Any) -> None:
    """Its decay to 0 ends with its only step: a warning says that nothing is learned."""
    warning = "the only step of the run has learning rate 0"
    assert warning in train("run", "--train-iters 1").err
    for name, flags in (("two", "--train-iters 2"), ("low", "--train-iters 1 --min-lr 1e-5")):
        assert warning not in train(name, flags).err
    first = train("early", "--train-iters 3 --exit-interval 2")
    again = train("early", f"--train-iters 3 --load {first.directory}")
    assert (again.status, warning in again.err) == (0, False), "the last step of a decay to 0"


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_a_reader_that_ends(
    processes: str, arguments: Callable[[str, str], list[str]], tmp_path: Path
) -> None:
    """With its output in a pipe that ends early (`2>&1 | head -1`), a run ends as any other."""
    reader, writer = os.pipe()
    flags = f"--train-iters 20 --exit-interval 10 --nproc-per-node {processes} --sample-tokens 5"
    process = WarmPopen(
        [sys.executable, "-m", "lmcore.cli.main", *arguments("run", flags)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=writer,
        stderr=subprocess.STDOUT,
    )
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.readline()
    assert process.wait(timeout=240) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text("utf-8"))
    assert (summary["status"], summary["iteration"]) == (
        "step 10 is a multiple of --exit-interval 10",
        10,
    )
    assert main(["train", "--continue", str(tmp_path / "run")]) == 0
