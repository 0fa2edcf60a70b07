"""Whole runs that score the model on tasks: scores, what they leave alone, layouts, endings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcore.cli.main import main

STEPS = "--train-iters 6 --save-interval 2 --seq-length 32 --init-method-std 0.2"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
MINE = """
from lmcore.evaluation.task import Task, Text

def lines(path):
    for line in path.read_text().splitlines():
        yield Text(line, line)

MINE = Task("mine", "Lines.", ("mine*.txt",), lines, ("loss", "token_perplexity"), "me")
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of questions, of ends of passages, and of a task of the user."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"query": f"Is it {n}?", "choices": ["yes", "no", "maybe so"], "gold": n % 3}
        for n in range(7)
    ]
    (folder / "openbook_qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = [{"text": f"To be or not to be, {'and so on ' * n}{n}"} for n in range(5)]
    (folder / "lambada_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ends))
    (folder / "mine.txt").write_text("All is well that ends well, and better so.\nShort.\n")
    (folder / "mine.py").write_text(MINE)
    return folder


def flags_of(tasks: Path, interval: int = 2) -> str:
    named = f"--eval-tasks openbookqa,lambada {tasks}/mine.py --eval-tasks-data {tasks}"
    return f"{named} --eval-tasks-interval {interval}"


def test_scores_and_what_they_leave_alone(
    train: Any, tasks: Path, assert_same: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lmcore evaluate` gives a checkpoint the same scores; steps and weights are as without them.

    A resumed run may change the tasks, and scores the steps that are left.
    """
    flags = f"{STEPS} {DROPOUT}"
    run = train("scored", f"{flags} {flags_of(tasks)}")
    assert run.status == 0, run.err
    plain = train("plain", flags)
    assert run.curve() == plain.curve()
    assert_same(run.saved(), plain.saved())
    assert [row["step"] for row in run.rows if "tasks" in row] == [2, 4, 6]
    for step in (2, 6):
        command = ["evaluate", str(run.directory), "--ckpt-step", str(step), "--precision", "fp32"]
        command += ["--device", "cpu", "--json", "--task", "openbookqa,lambada"]
        capsys.readouterr()
        assert main([*command, str(tasks / "mine.py"), "--task-data", str(tasks)]) == 0
        (wanted,) = json.loads(capsys.readouterr().out).values()
        for name, values in run.rows[step - 1]["tasks"].items():
            metrics = {key: one["value"] for key, one in wanted[name]["metrics"].items()}
            errors = {
                f"{key}_error": one["error"]
                for key, one in wanted[name]["metrics"].items()
                if one["error"] is not None
            }
            counts = {"examples": wanted[name]["examples"]}
            # An error comes from the differences of examples, which have fewer digits.
            assert {key: values.pop(key) for key in errors} == pytest.approx(errors, rel=1e-5)
            assert values == pytest.approx({**metrics, **counts}, rel=1e-6)
    assert run.summary["tasks"] == run.rows[-1]["tasks"]
    assert run.summary["tasks_step"] == 6
    assert run.summary["task_seconds"] > 0
    assert " tasks at iteration 4 | openbookqa acc_norm: " in run.err
    assert "tasks     openbookqa (7), lambada (5), mine (2): scored every 2 steps" in run.err
    load = f"--load {run.directory}/checkpoints/iter_0000002 --eval-tasks lambada"
    more = f"{load} --eval-tasks-data {tasks} --eval-tasks-limit 3"
    resumed = train("resumed", f"{flags} {more}")
    assert resumed.status == 0, resumed.err
    assert "settings differ" not in resumed.err
    assert resumed.curve() == plain.curve()[2:]
    assert [row.get("tasks", {}).get("lambada", {}).get("examples") for row in resumed.rows] == [
        *(None, None, None, 3)
    ]


def test_events(train: Any, tasks: Path) -> None:
    """TensorBoard has a scalar for each metric, also at a step between its intervals."""
    flags = f"--train-iters 2 {flags_of(tasks, 1)} --tensorboard-log-interval 9"
    run = train("events", flags)
    assert run.status == 0, run.err
    (events,) = (run.directory / "tensorboard").iterdir()
    content = events.read_bytes()
    assert content.count(b"tasks/openbookqa/acc_norm_error") == 2
    assert content.count(b"tasks/mine/token_perplexity") == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--eval-tasks lambada", "the task `lambada` needs `--eval-tasks-data DIR`"),
        ("--eval-tasks lambda --eval-tasks-data {folder}", "there is no task `lambda`"),
        ("--eval-tasks piqa --eval-tasks-data {folder}", "file: `--eval-tasks-data piqa=FILE`"),
        ("--eval-tasks lambada --eval-tasks-data {folder}/lame.jsonl", "`text`"),
        (
            "--eval-tasks lambada --eval-tasks-data {folder} --model-family bert",
            "cannot score BERT models",
        ),
    ],
)
def test_refused_before_the_first_step(train: Any, tasks: Path, flags: str, message: str) -> None:
    """Missing and wrong files, and other models, end the run before anything is written."""
    (tasks / "lame.jsonl").write_text('{"words": "none"}\n')
    run = train("refused", f"--train-iters 2 {flags.format(folder=tasks)}")
    assert run.status != 0
    assert message in run.err
    assert not run.directory.exists() or not (run.directory / "metrics.jsonl").exists()


SIGNALS = """
import os, signal
from lmcore.train import task_scores
made, count = task_scores._batch, []
def _batch(*arguments):
    count.append(1)
    if len(count) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return made(*arguments)
task_scores._batch = _batch
"""


def test_signal_during_scores(start: Any, finish: Any, tasks: Path) -> None:
    """A signal ends the scores; no part of them is reported, and the run is saved."""
    flags = f"--train-iters 9 --micro-batch-size 1 --global-batch-size 2 {flags_of(tasks, 2)}"
    run = finish(start("signal", flags, before=SIGNALS), "signal")
    assert run.summary["status"] == "received SIGTERM"
    assert run.summary["tasks"] is None
    assert len(run.rows) in {2, 3}
    assert not any("tasks" in row for row in run.rows)
    assert Path(run.summary["checkpoint"]).is_dir()


TENSOR = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4"


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        "",
        TENSOR,
        f"{TENSOR} --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
        "--zero-stage 3",
    ],
)
def test_layouts(start: Any, finish: Any, train: Any, tasks: Path, layout: str) -> None:
    """Two processes give the scores of one, however they divide the work."""
    flags = "--train-iters 2 --seq-length 32 --init-method-std 0.2 --micro-batch-size 4"
    flags += f" --global-batch-size 8 {flags_of(tasks)}"
    alone = train("alone", flags)
    assert alone.status == 0, alone.err
    run = finish(start("divided", f"{flags} --nproc-per-node 2 {layout}"), "divided")
    assert run.status == 0, run.err
    for name, values in alone.rows[-1]["tasks"].items():
        assert run.rows[-1]["tasks"][name] == pytest.approx(values, rel=1e-5)
