"""Signals in each phase of a run: it ends in order, and continues as the same run."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcore.cli.main import main
from lmcore.train.step_queue import StepQueue

FLAGS = (
    "--train-iters 6 --eval-interval 2 --eval-iters 2 --split 60,20,20 --save-interval 3"
    " --sample-tokens 4 --hidden-dropout 0.1"
)
SIGNALS = [signal.SIGINT, signal.SIGTERM]
AT_ONCE = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


def places(*targets: tuple[Any, ...]) -> list[Any]:
    """Return cases of each target with both signals: one of them in the full set only, in turn."""
    return [
        pytest.param(*target, number, marks=() if (first + second) % 2 else pytest.mark.full)
        for first, target in enumerate(targets)
        for second, number in enumerate(SIGNALS)
    ]


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sends a signal to this process, when a function is called for the first time."""

    def go(target: str, number: signal.Signals, *, times: int = 1, after: bool = False) -> None:
        module, _, name = target.partition(":")
        *owners, last = name.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        real, sent = getattr(owner, last), []

        def call(*args: Any, **options: Any) -> Any:
            result = real(*args, **options) if after else None
            if not sent:
                sent.append(number)
                for _ in range(times):
                    os.kill(os.getpid(), number)
            return result if after else real(*args, **options)

        monkeypatch.setattr(owner, last, call)

    return go


@pytest.fixture
def whole(train_once: Any) -> Any:
    """The run that nothing interrupts."""
    return train_once(FLAGS)


@pytest.fixture
def assert_continues(train: Any, whole: Any, assert_same: Any, monkeypatch: Any) -> Any:
    """The same command again completes the run that was interrupted."""

    def check(run: Any, *, skipped_validation: int | None = None) -> None:
        monkeypatch.undo()
        again = train("run", f"{FLAGS} --load {run.directory}")
        assert again.status == 0, again.err
        rows = whole.curve()
        if skipped_validation is not None:
            rows[skipped_validation - 1] = (*rows[skipped_validation - 1][:-1], None)
        assert again.curve() == rows
        assert_same(again.saved(), whole.saved())
        for name in ("status", "iteration", "loss", "valid_loss", "test_loss", "sample"):
            assert again.summary[name] == whole.summary[name], name
        assert again.summary["checkpoint"].endswith("iter_0000006")
        assert not (again.directory / "run.lock").exists()

    return check


@pytest.mark.parametrize(
    "target, after, number",
    places(
        ("lmcore.cli.train:find_plugins", False),
        ("lmcore.base.lock:LockFile.acquire", True),
        ("lmcore.train.run:build_datasets", True),
        ("lmcore.train.run:restore", False),
    ),
)
def test_before_training(
    train: Any,
    signal_at: Any,
    assert_continues: Any,
    target: str,
    after: bool,
    number: signal.Signals,
) -> None:
    """The run ends at once with the shell's status, and leaves no directory and no lock."""
    signal_at(target, number, after=after)
    run = train("run", FLAGS)
    status, word = AT_ONCE[number]
    assert run.status == status
    assert run.err.splitlines()[-1] == word
    assert not run.directory.exists()
    assert_continues(run)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_logouts_and_schedulers(
    train: Any, signal_at: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """They end a run as SIGTERM does: at once before the first step, saved after a step."""
    signal_at("lmcore.train.run:restore", number)
    early = train("run", FLAGS)
    assert early.status == 128 + number
    assert early.err.splitlines()[-1] == f"terminated by {number.name}"
    assert not early.directory.exists()
    monkeypatch.undo()
    signal_at("lmcore.train.loop:StepQueue.submit", number)
    run = train("run", FLAGS)
    assert run.status == 0, run.err
    assert run.summary["status"] == f"received {number.name}"
    assert run.saved(1)


def test_kill_switch(train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that appears ends the run, saved; while it exists, no run with it starts."""
    path = tmp_path / "stop"
    real = StepQueue.submit

    def submit(queue: StepQueue, step: int) -> None:
        path.touch()
        real(queue, step)

    monkeypatch.setattr(StepQueue, "submit", submit)
    monkeypatch.setattr("lmcore.train.exit_conditions._KILL_SWITCH_SECONDS", 0.0)
    flags = f"{FLAGS} --kill-switch-path {path}"
    run = train("run", flags)
    assert run.status == 0, run.err
    assert run.summary["status"] == f"the kill switch {path} exists"
    assert run.saved(1)
    again = train("run", f"{flags} --load {run.directory}")
    assert again.status == 2
    assert f"the run does not start: the kill switch `{path}` exists" in again.err
    path.unlink()
    monkeypatch.setattr(StepQueue, "submit", real)
    done = train("run", f"{flags} --load {run.directory}")
    assert (done.status, done.summary["status"]) == (0, "completed")
    assert "does not exist" not in done.err
    other = train("other", f"{FLAGS} --kill-switch-path {tmp_path}/absent/stop")
    assert (
        f"warning: the folder of the kill switch, `{tmp_path}/absent`, does not exist" in other.err
    )


@pytest.mark.parametrize(
    "target, step, number",
    places(
        ("lmcore.train.loop:StepQueue.submit", 1),
        ("lmcore.train.loop:Evaluator.validate", 2),
        ("lmcore.train.resume.save:save_checkpoint", 4),
    ),
)
def test_while_training(
    train: Any,
    signal_at: Any,
    assert_continues: Any,
    target: str,
    step: int,
    number: signal.Signals,
) -> None:
    """The run saves and ends with success; a second signal ends it at once."""
    signal_at(target, number)
    run = train("run", FLAGS)
    assert run.status == 0, run.err
    assert run.summary["status"] == f"received {number.name}"
    assert run.summary["iteration"] == step
    assert run.saved(step)
    # A validation is left out once the run ends.
    assert_continues(run, skipped_validation=None if step % 2 else step)


@pytest.mark.parametrize(
    "target, number",
    places(
        ("lmcore.train.loop:StepQueue.submit",),
        ("lmcore.train.loop:Evaluator.validate",),
        ("lmcore.train.resume.save:save_checkpoint",),
        ("lmcore.checkpoint.save:write_durably",),
    ),
)
def test_second_signal(
    train: Any,
    signal_at: Any,
    assert_continues: Any,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    number: signal.Signals,
) -> None:
    """The second signal ends the run without a save, and leaves nothing half-written."""
    monkeypatch.setattr("lmcore.train.exit_conditions.SAME_SIGNAL_SECONDS", 0.0)
    signal_at(target, number, times=2)
    run = train("run", FLAGS)
    status, word = AT_ONCE[number]
    assert run.status == status
    assert run.err.splitlines()[-1] == word
    assert run.summary["status"] == word
    assert not list((run.directory / "checkpoints").glob(".*"))
    assert not (run.directory / "run.lock").exists()
    assert_continues(run)


@pytest.mark.parametrize("number", SIGNALS)
def test_second_signal_after_a_checkpoint(
    train: Any, signal_at: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The last line has the command that continues the run, and it does."""
    monkeypatch.setattr("lmcore.train.exit_conditions.SAME_SIGNAL_SECONDS", 0.0)
    signal_at("lmcore.train.loop:Evaluator.validate", number, times=2)
    run = train("run", FLAGS.replace("--save-interval 3", "--save-interval 1"))
    status, word = AT_ONCE[number]
    assert run.status == status
    command = f"lmcore train --continue {run.directory}"
    assert run.err.splitlines()[-3:] == [word, "", f"to continue from step 1: `{command}`"]
    monkeypatch.undo()
    assert main(command.split()[1:]) == 0
    assert run.summary["status"] == "completed"
    assert run.summary["iteration"] == 6


@pytest.mark.parametrize("number", SIGNALS)
def test_in_the_test(
    train: Any, signal_at: Any, assert_continues: Any, number: signal.Signals
) -> None:
    """A run without its test loss is not complete: the next start evaluates the test set."""
    signal_at("lmcore.train.loop:Evaluator.test", number)
    run = train("run", FLAGS)
    assert run.status == 0, run.err
    assert run.summary["status"] == f"received {number.name}"
    assert run.summary["test_loss"] is None
    assert "continue " in run.out
    assert_continues(run)


@pytest.mark.parametrize("number", SIGNALS)
def test_after_training(
    train: Any, signal_at: Any, assert_continues: Any, number: signal.Signals
) -> None:
    """A signal between the last save and the summary loses only what the next start repeats."""
    signal_at("lmcore.train.report.run_report:RunReport.finish", number)
    run = train("run", FLAGS)
    status, word = AT_ONCE[number]
    assert run.status == status
    assert run.err.splitlines()[-1] == word
    assert not (run.directory / "summary.json").exists()
    assert_continues(run)
