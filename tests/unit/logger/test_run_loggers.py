"""The loggers of a run: what they get, and that none of them can stop it or hold it up."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping

import pytest

from lmcore.base.errors import MissingPackageError
from lmcore.config.section import Config, LoggingSection
from lmcore.logger import run_loggers as module
from lmcore.logger.run_loggers import IDS_NAME, RunLoggers
from lmcore.model.run_logger import LoggedRun, OpenLogger, RunLogger, StepMetrics, run_loggers

CONFIG = Config(logging=LoggingSection(tensorboard=False))
METRICS = StepMetrics(3, 24, {"train/loss": 2.5, "train/odd": math.inf})


class Notes(OpenLogger):
    """Logger that keeps what it is given."""

    def __init__(self, run: LoggedRun) -> None:
        self.run, self.calls = run, []
        self.run_id = run.run_id or "first"

    def log(self, metrics: StepMetrics) -> None:
        self.calls.append((metrics.step, dict(metrics.values)))

    def text(self, name: str, text: str, step: int) -> None:
        self.calls.append((name, text, step))

    def close(self, status: str) -> Mapping[str, float]:
        self.calls.append(status)
        return {"kwh": 2.0}


class Broken(Notes):
    """Logger that fails at the method named by the run."""

    def log(self, metrics: StepMetrics) -> None:
        if self.run.name == "log":
            raise ValueError("no\nsuch server")
        if self.run.name == "exit":
            raise SystemExit(3)

    def close(self, status: str) -> Mapping[str, float]:
        if self.run.name == "close":
            raise OSError(5, "Input/output error", "/a/file")
        if self.run.name == "hang":
            time.sleep(30)
        if self.run.name == "none":
            return None  # type: ignore[return-value]
        if self.run.name == "text":
            return {"kwh": "many"}  # type: ignore[dict-item]
        return {}


opened: list[Notes] = []


def open_notes(run: LoggedRun) -> Notes:
    opened.append(Notes(run))
    return opened[-1]


def open_broken(run: LoggedRun) -> object:
    if run.name == "absent":
        raise MissingPackageError("notes", needed_for="`--notes`", install="pip install notes")
    return "no logger" if run.name == "wrong" else Broken(run)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Function that makes one record the only logger besides the core's."""
    opened.clear()

    def register(function: str, *, in_background: bool = True) -> None:
        record = RunLogger("notes", "Notes", f"{__name__}:{function}", in_background=in_background)
        monkeypatch.setattr(record.__class__, "load", lambda one: globals()[function])
        monkeypatch.setitem(run_loggers(), "notes", record)

    return register


@pytest.mark.parametrize("in_background", [True, False])
def test_a_logger_gets_everything_in_order(only, tmp_path, in_background):
    """Finite numbers, texts and the status; its own numbers come back."""
    only("open_notes", in_background=in_background)
    loggers = RunLoggers(LoggedRun(tmp_path, "run", CONFIG))
    loggers.log(METRICS)
    loggers.text("sample", "ay", 3)
    assert loggers.close("completed") == {"notes": {"kwh": 2.0}}
    assert loggers.close("completed") == {}
    assert opened[0].calls == [(3, {"train/loss": 2.5}), ("sample", "ay", 3), "completed"]


def test_a_continued_run_is_the_same_one(only, tmp_path):
    """The identity is kept in the run directory; a run that begins at step 0 is another one."""
    only("open_notes")
    for step in (0, 5, 0):
        RunLoggers(LoggedRun(tmp_path, "run", CONFIG, step=step)).close("completed")
        assert json.loads((tmp_path / IDS_NAME).read_text()) == {"notes": "first"}
    assert [one.run.run_id for one in opened] == [None, "first", None]


@pytest.mark.parametrize("content", ["", "[1]", '{"notes": 3}', "\x00", "[" * 100_000])
def test_identities_that_cannot_be_read(only, tmp_path, content):
    """A damaged file is a new run at the logger."""
    only("open_notes")
    (tmp_path / IDS_NAME).write_text(content)
    RunLoggers(LoggedRun(tmp_path, "run", CONFIG, step=5)).close("completed")
    assert opened[0].run.run_id is None


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize(
    "fault,words",
    [
        ("absent", "nothing is logged to Notes: `--notes` needs the package `notes`"),
        ("wrong", "nothing is logged to Notes: TypeError"),
        ("log", "nothing more is logged to Notes: ValueError: no such server"),
        ("exit", "nothing more is logged to Notes: SystemExit: 3"),
        ("close", "nothing more is logged to Notes: /a/file: Input/output error"),
        ("none", "nothing more is logged to Notes: TypeError: `close` returned None, not a mapp"),
        ("text", "nothing more is logged to Notes: TypeError: must be real number, not str"),
    ],
)
def test_a_failure_is_one_warning(only, tmp_path, caplog, fault, words, in_background):
    """Nothing is raised, and the logger is not called again."""
    only("open_broken", in_background=in_background)
    loggers = RunLoggers(LoggedRun(tmp_path, fault, CONFIG))
    for _ in range(3):
        loggers.log(METRICS)
    assert loggers.close("completed") == {}
    (record,) = caplog.records
    assert record.message.startswith(words)
    assert record.levelno == logging.WARNING
    if fault == "absent":
        assert "run `pip install notes`" in record.message


def test_a_hanging_logger_does_not_hold_up_the_end(only, tmp_path, caplog, monkeypatch):
    """The end waits for a limited time, with a warning."""
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.2)
    only("open_broken")
    loggers = RunLoggers(LoggedRun(tmp_path, "hang", CONFIG))
    began = time.monotonic()
    assert loggers.close("completed") == {}
    assert time.monotonic() - began < 10
    assert "did not end within" in caplog.text


def test_a_slow_logger_does_not_hold_up_steps(only, tmp_path, caplog, monkeypatch):
    """Rows wait for it up to a limit, beyond which it is left alone."""
    monkeypatch.setattr(module, "_MOST_WAITING", 4)
    gate = threading.Event()
    monkeypatch.setattr(Notes, "log", lambda self, metrics: gate.wait(30))
    only("open_notes")
    loggers = RunLoggers(LoggedRun(tmp_path, "run", CONFIG))
    began = time.monotonic()
    for _ in range(50):
        loggers.log(METRICS)
    assert time.monotonic() - began < 10
    assert "it is 4 rows behind" in caplog.text
    gate.set()
    loggers.close("completed")


def test_settings_choose_the_loggers(tmp_path):
    """Each of the core's loggers has a setting that turns it on; without any there is none."""
    assert len(RunLoggers(LoggedRun(tmp_path, "run", CONFIG))) == 0
    for name, changes in {
        "tensorboard": {"tensorboard": True},
        "wandb": {"wandb_project": "p"},
        "mlflow": {"mlflow_experiment": "e"},
        "codecarbon": {"codecarbon_dir": "d"},
    }.items():
        config = Config(logging=LoggingSection(**{"tensorboard": False, **changes}))
        assert [one.name for one in run_loggers().values() if one.wanted(config)] == [name]
