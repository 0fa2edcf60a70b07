"""A run directory that is removed or renamed under a live run: nothing is lost without a word."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from lmcore.base.lock import LockFile
from lmcore.train.report.run_report import RunReport

FLAGS = "--train-iters 6 --save-interval 4"


@pytest.mark.parametrize("way", ["removed", "renamed"])
def test_a_lost_directory_is_created_again(
    train: Any, train_once: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Configuration, tokenizer and all rows are in the new directory, which continues the run."""
    whole = train_once(FLAGS)
    step = RunReport.step

    def lose(self: RunReport, record: Any, *more: Any) -> None:
        if record.step == 3:
            directory = self.directory.path
            if way == "removed":
                shutil.rmtree(directory)
            else:
                directory.rename(directory.with_name("elsewhere"))
        step(self, record, *more)

    monkeypatch.setattr(RunReport, "step", lose)
    monkeypatch.setattr("lmcore.train.report.run_report._LOOK_SECONDS", 0.0)
    run = train("run", FLAGS)
    monkeypatch.undo()
    assert run.status == 0, run.err
    assert run.err.count("was removed or renamed") == 1
    assert run.curve() == whole.curve()
    assert_same(run.saved(), whole.saved())
    assert run.summary["status"] == "completed"
    for name in ("config.yaml", "environment.json", "kernels.json", "tokenizer"):
        assert (run.directory / name).exists(), name
    assert not (run.directory / "run.lock").exists()
    assert [path.name for path in (run.directory / "tensorboard").iterdir()]


def test_another_run_in_its_place_ends_the_run(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run never mixes with the run that has taken its path."""
    step = RunReport.step

    def exchange(self: RunReport, record: Any, *more: Any) -> None:
        if record.step == 3:
            directory = self.directory.path
            directory.rename(directory.with_name("elsewhere"))
            directory.mkdir()
            LockFile(directory / "run.lock").acquire()
        step(self, record, *more)

    monkeypatch.setattr(RunReport, "step", exchange)
    monkeypatch.setattr("lmcore.train.report.run_report._LOOK_SECONDS", 0.0)
    run = train("run", FLAGS)
    assert run.status == 2, run.err
    assert "another run writes to" in run.err
    assert not (run.directory / "metrics.jsonl").exists()


@pytest.mark.parametrize("owner", ["nobody", "another run"])
def test_a_lost_lock(train: Any, monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    """A removed lock is taken again; one that another run has taken over ends this run."""
    step = RunReport.step
    locked = []

    def lose(self: RunReport, record: Any, *more: Any) -> None:
        lock = self.directory.path / "run.lock"
        if record.step == 3:
            lock.unlink()
            if owner == "another run":
                LockFile(lock).acquire()
        step(self, record, *more)
        locked.append(lock.exists())

    monkeypatch.setattr(RunReport, "step", lose)
    monkeypatch.setattr("lmcore.train.report.run_report._LOOK_SECONDS", 0.0)
    run = train("run", FLAGS)
    if owner == "nobody":
        assert run.status == 0, run.err
        assert locked == [True] * 6
    else:
        assert run.status == 2, run.err
        assert "another run writes to" in run.err
        assert len(run.rows) == 2
