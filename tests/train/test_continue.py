"""`lmcore train --continue RUN`: everything comes from the run, and one question is asked."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suite.warm import WarmPopen

from lmcore.cli.main import main

BASE = "--train-iters 12 --hidden-dropout 0.1 --lr 0.01 --lr-warmup-fraction 0.25"
EPOCHS = "--train-iters 6 --micro-batch-size 128 --split 100,0,0"
"""A little more than two epochs."""


@pytest.fixture
def go_on(copy_of: Any) -> Callable[..., Any]:
    """Runs `lmcore train --continue` in this process, on a run or its copy."""

    def go(run: Any, flags: str = "", *, copy: str | None = None, path: Path | None = None) -> Any:
        run = run if copy is None else copy_of(run, copy)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["train", "--continue", str(path or run.directory), *flags.split()])
        return type(run)(status, out.getvalue(), err.getvalue(), run.directory)

    return go


def files_of(run: Any) -> dict[Path, bytes]:
    """Return the content of every file of a run."""
    return {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}


def cosine(position: float, *, highest: float, warmup: float, decay: float) -> float:
    """Return the rate of a cosine schedule to 0, written down again."""
    if position <= warmup:
        return highest * position / warmup
    return highest / 2 * (1 + math.cos(math.pi * (position - warmup) / (decay - warmup)))


@pytest.mark.parametrize(
    "settings",
    ["its file", "the checkpoint", pytest.param("moved", marks=pytest.mark.full)],
)
def test_the_rest_of_a_run(
    train: Any, train_once: Any, go_on: Any, assert_same: Any, settings: str
) -> None:
    """The printed command continues bitwise, also in another place and without `config.yaml`."""
    whole = train_once(BASE)
    part = train("part", f"{BASE} --exit-interval 6")
    (command,) = re.findall(r"continue +lmcore (.*)", part.out)
    assert shlex.split(command) == ["train", "--continue", str(part.directory)]
    if settings == "the checkpoint":
        (part.directory / "config.yaml").unlink()
    if settings == "moved":
        moved = part.directory.rename(part.directory.with_name("moved"))
        part = type(part)(part.status, part.out, part.err, moved)
    more = go_on(part, "--exit-interval none")
    assert more.status == 0, more.err
    assert "differ" not in more.err
    assert more.curve() == whole.curve()
    assert_same(more.saved(), whole.saved())
    assert "lmcore train --continue" not in more.out


@pytest.mark.full
@pytest.mark.distributed
def test_another_number_of_processes(train: Any, train_once: Any, go_on: Any) -> None:
    """Two processes take the steps of one but for rounding, and one process continues their run."""
    flags = "--train-iters 12 --lr 0.01 --global-batch-size 8"
    whole = train_once(flags)
    part = train("part", f"{flags} --exit-interval 4")
    argv = ["--nproc-per-node", "2", "--pipeline-model-parallel-size", "2", "--exit-interval", "8"]
    more = subprocess.run(
        [sys.executable, "-m", "lmcore.cli.main", "train", "--continue", part.directory, *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert more.returncode == 0, more.stderr
    assert f"lmcore train --continue {part.directory}\n" in more.stdout
    last = go_on(part, "--nproc-per-node 1 --pipeline-model-parallel-size 1 --exit-interval none")
    assert last.status == 0, last.err
    losses = [row["loss"] for row in last.rows]
    assert losses == pytest.approx([row["loss"] for row in whole.rows], rel=1e-4)


def test_a_finished_run_changes_nothing(train_once: Any, copy_of: Any, go_on: Any) -> None:
    """Without a new length it says so; fewer steps than are done are an error."""
    run = copy_of(train_once(BASE), "run")
    before = files_of(run)
    again = go_on(run)
    assert again.status == 0
    assert "nothing is left to train" in again.out
    fewer = go_on(run, "--train-iters 5")
    assert fewer.status == 2
    assert "done 12 steps already" in fewer.err
    assert files_of(run) == before


@pytest.mark.parametrize(
    "answer", ["extend", "restart", pytest.param("keep", marks=pytest.mark.full)]
)
def test_a_longer_run(train_once: Any, go_on: Any, answer: str) -> None:
    """Each schedule has its rates, survives an end before and after a save, and is asked once."""
    lowest = "--min-lr 0.001" if answer == "keep" else ""
    run = train_once(f"{BASE} {lowest}")
    flags = f"--train-iters 20 --schedule {answer}"
    first = go_on(run, f"{flags} --exit-interval 16", copy=answer)
    assert first.status == 0, first.err
    again = go_on(first, flags if answer == "restart" else "--exit-interval none")
    assert again.status == 0, again.err
    rates = [row["learning_rate"] for row in again.rows]
    assert len(rates) == 20
    expected = {
        "extend": [cosine(n, highest=0.01, warmup=5, decay=20) for n in range(13, 21)],
        "restart": [cosine(n, highest=0.01, warmup=2, decay=8) for n in range(1, 9)],
        "keep": [0.001] * 8,
    }[answer]
    assert rates[12:] == pytest.approx(expected, abs=1e-12)
    assert rates[:12] == [row["learning_rate"] for row in run.rows]


def test_an_answer_is_kept_if_the_run_ends_before_a_save(
    train_once: Any, go_on: Any, monkeypatch: Any
) -> None:
    """The run's `config.yaml` has it; a further length is a new question."""
    run = train_once(BASE)

    def interrupted(*_args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lmcore.train.step_queue.StepQueue.submit", interrupted)
        first = go_on(run, "--train-iters 20 --schedule restart", copy="run")
    assert first.status == 130
    longer = go_on(first, "--train-iters 24")
    assert longer.status == 2
    assert "--schedule extend" in longer.err
    again = go_on(first)
    assert again.status == 0, again.err
    assert again.rows[12]["learning_rate"] == pytest.approx(0.005)


def test_the_error_has_the_rates_of_each_schedule(train_once: Any, go_on: Any) -> None:
    """Without a terminal: the consequences of each choice, and nothing is changed."""
    run = train_once(BASE)
    refused = go_on(run, "--train-iters 20")
    assert refused.status == 2
    found = dict(re.findall(r"`(\w+)` is .*: (.*)", refused.err))
    following = cosine(13, highest=0.01, warmup=5, decay=20)
    assert found == {
        "extend": f"rate {following:.3g} at the next step, 0 at the end",
        "keep": "not possible, the rate of every remaining step would be 0",
        "restart": "rate 0.005 at the next step, 0 at the end",
    }
    assert "`--schedule extend` or `--schedule restart`" in refused.err
    assert "--schedule keep" not in refused.err


def test_a_missing_schedule_is_refused_before_the_device_starts(
    train_once: Any, go_on: Any, monkeypatch: Any
) -> None:
    """The device may take minutes to start; a difference that it is not needed for comes first."""
    run = train_once(BASE)

    def started(*_args: Any) -> None:
        raise AssertionError("the device is started")

    monkeypatch.setattr("lmcore.cli.train.import_torch", started)
    refused = go_on(run, "--train-iters 20")
    assert refused.status == 2
    assert "choose one by `--schedule extend` or `--schedule restart`" in refused.err


def test_all_problems_come_at_once(train_once: Any, go_on: Any) -> None:
    """Another model, optimizer and schedule are one error; flags that contradict are, too."""
    run = train_once(BASE)
    wrong = go_on(run, "--train-iters 20 --hidden-size 32 --optimizer sgd --seed 5")
    assert wrong.status == 2
    assert wrong.err.count("error:") == 4, wrong.err
    (model,) = re.findall(r"hint: (.*)", go_on(run, "--hidden-size 32").err)
    assert model == "leave out the settings that change the model of the run"
    twice = go_on(run, f"--load {run.directory} --finetune --preset gpt2-124m")
    assert twice.status == 2
    assert twice.err.count("cannot be combined with `--continue`") == 3


def test_more_epochs_keep_the_order_of_the_samples(
    train: Any, train_once: Any, go_on: Any, assert_same: Any
) -> None:
    """The samples so far are not repeated, and an end in between changes nothing."""
    run = train_once(EPOCHS)
    flags = "--train-iters 12 --schedule extend"
    whole = go_on(run, flags, copy="whole")
    assert whole.status == 0, whole.err
    assert "the order of its first 768 samples is kept" in whole.err
    part = go_on(run, f"{flags} --exit-interval 5", copy="part")
    for _ in range(2):
        part = go_on(part, "" if part.summary["iteration"] < 10 else "--exit-interval none")
        assert part.status == 0, part.err
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())


def test_an_earlier_checkpoint(train: Any, go_on: Any, assert_same: Any, capsys: Any) -> None:
    """`--ckpt-step` returns to it, in training and for `generate`; a wrong step names the steps."""
    run = train("run", f"{BASE} --save-interval 4")
    curve, saved = run.curve(), run.saved(12)
    again = go_on(run, "--ckpt-step 8")
    assert again.status == 0, again.err
    assert "from step 8" in again.err.replace("\n", " ")
    assert again.curve() == curve
    assert_same(again.saved(), saved)
    wrong = go_on(run, "--load-tag global_step7")
    assert wrong.status == 2
    assert "there are checkpoints of steps 4, 8, 12" in wrong.err
    argv = ["generate", "--load", str(run.directory), "--tokens", "2", "--ckpt-step"]
    assert main([*argv, "4"]) == 0
    assert f"loaded {run.directory}/checkpoints/iter_0000004" in capsys.readouterr().err
    assert main([*argv, "5"]) == 2


def test_the_model_of_the_checkpoint(train_once: Any, tmp_path: Path, capsys: Any) -> None:
    """`--use-checkpoint-args` takes model and tokenizer; flags that contradict are refused."""
    run = train_once(BASE)
    argv = ["train", "--load", str(run.directory), "--use-checkpoint-args", "--finetune"]
    argv += ["--train-iters", "1", "--eval-iters", "0", "--sample-tokens", "0", "--save"]
    capsys.readouterr()
    assert main([*argv, str(tmp_path / "tuned")]) == 0
    text = (tmp_path / "tuned/config.yaml").read_text()
    assert re.search(r"\n  hidden_size: 16 +# checkpoint: ", text)
    assert re.search(r"\n  hidden_dropout: 0.1 +# checkpoint: ", text)
    assert re.search(r"\n  tokenizer_type: ByteTokenizer +# checkpoint: ", text)
    assert re.search(r"\n  # lr: 0.002 +# default", text), "the optimizer is this run's"
    assert main([*argv, str(tmp_path / "other"), "--num-layers", "3"]) != 0
    assert "num_layers: checkpoint 2, model 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda folder: None, "no such directory"),
        (lambda folder: (folder / "runs").mkdir(), "no run found"),
        (lambda folder: (folder / "runs").write_text("x"), "no run found"),
        (lambda folder: (folder / "runs/checkpoints").mkdir(parents=True), "no checkpoint in"),
    ],
)
def test_no_run(tmp_path: Path, capsys: Any, make: Any, words: str) -> None:
    """A path without a run is an error that says what is missing."""
    make(tmp_path)
    assert main(["train", "--continue", str(tmp_path / "runs")]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_checkpoint(train: Any, go_on: Any) -> None:
    """It may have begun with another model's weights: it does not start from initial ones."""
    part = train("part", f"{BASE} --exit-interval 6")
    shutil.rmtree(part.directory / "checkpoints")
    more = go_on(part, "--exit-interval none")
    assert more.status == 2
    assert "the run has no checkpoint" in more.err
    assert f"the first line of `{part.directory / 'config.yaml'}`" in more.err
    assert not list(part.directory.glob("checkpoints/*"))
    accepted = go_on(part, "--exit-interval none --no-exit-on-missing-checkpoint")
    assert accepted.status == 0
    assert "starting from initial weights" in accepted.err


def test_the_data_of_a_moved_run_is_named(
    train: Any, go_on: Any, data_prefix: str, tmp_path: Path
) -> None:
    """Data that is gone is named, and another path for it continues the run."""
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(data_prefix + suffix, tmp_path / f"text{suffix}")
    part = train("part", f"{BASE} --exit-interval 6", str(tmp_path / "text"))
    for suffix in (".bin", ".idx", ".meta.json"):
        (tmp_path / f"text{suffix}").rename(tmp_path / f"moved{suffix}")
    gone = go_on(part)
    assert gone.status != 0
    assert str(tmp_path / "text") in gone.err
    more = go_on(part, f"--data-path {tmp_path / 'moved'} --exit-interval none")
    assert more.status == 0, more.err
    assert len(more.rows) == 12


def test_a_moved_project(train: Any, go_on: Any, data_prefix: str, tmp_path: Path) -> None:
    """Data that was moved together with the run is found at its place beside it."""
    (tmp_path / "old/data").mkdir(parents=True)
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(data_prefix + suffix, tmp_path / f"old/data/text{suffix}")
    part = train("old/runs/a", f"{BASE} --exit-interval 6", str(tmp_path / "old/data/text"))
    (tmp_path / "old").rename(tmp_path / "new")
    moved = type(part)(0, "", "", tmp_path / "new/runs/a")
    more = go_on(moved, "--exit-interval none")
    assert more.status == 0, more.err
    assert f"`{tmp_path / 'new/data/text'}` is used" in more.err
    assert len(more.rows) == 12
    assert not (tmp_path / "old").exists()


def test_the_question_on_a_terminal(train_once: Any, copy_of: Any) -> None:
    """The choices come with their rates; one that trains at rate 0 is not among the answers."""
    run = copy_of(train_once(BASE), "run")
    ours, theirs = pty.openpty()
    argv = ["train", "--continue", str(run.directory), "--train-iters", "14", "--progress", "plain"]
    process = WarmPopen(
        [sys.executable, "-m", "lmcore.cli.main", *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    os.write(ours, b"keep\nres\n")
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(ours, 65536):
            shown += data
    process.communicate(timeout=90)
    os.close(ours)
    text = shown.decode()
    assert process.returncode == 0, text
    assert text.count("Which schedule should be used: extend or restart?") == 2, text
    assert run.summary["iteration"] == 14
    rate = cosine(1, highest=0.01, warmup=0.5, decay=2)
    assert run.rows[12]["learning_rate"] == pytest.approx(rate)
