"""A run on a device that compiles programs in some of its steps."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import pytest

from lmcore.contract import Compilations, Device
from lmcore.train.report import compilation_watch
from lmcore.train.step import TrainStep
from lmcore_cpu import device as cpu

FLAGS = "--train-iters 8 --log-interval 4 --device cpu"


@pytest.fixture
def compile_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that has the device compile three programs in each of these steps."""

    def compile_in(steps: set[int], seconds: float = 0.2) -> None:
        compiled = [Compilations(5, 1.0)]
        create, take = cpu.create_device, TrainStep.__call__

        def create_device(settings: Any) -> Device:
            return dataclasses.replace(create(settings), compilations=lambda: compiled[0])

        def step(self: TrainStep, *arguments: Any) -> Any:
            pending = take(self, *arguments)
            if self.state.iteration in steps:
                time.sleep(seconds)
                before = compiled[0]
                compiled[0] = Compilations(before.count + 3, before.seconds + seconds)
            return pending

        monkeypatch.setattr(cpu, "create_device", create_device)
        monkeypatch.setattr(TrainStep, "__call__", step)

    return compile_in


def test_figures_and_notices(train: Any, compile_in: Any) -> None:
    """Steps that compile are named, and are in no figure of speed."""
    compile_in({1, 2, 6})
    run = train("run", FLAGS)
    assert run.status == 0, run.err
    rows = run.rows
    assert [row["step"] for row in rows if "compiles" in row] == [1, 2, 6]
    for row in rows:
        compiles = row["step"] in {1, 2, 6}
        assert row.get("compilations") == (3 if compiles else None)
        assert row.get("compile_seconds") == (pytest.approx(0.2) if compiles else None)
        assert ("tokens_per_second" in row) is not compiles
        assert row["step_time_ms"] > (200.0 if compiles else 0.0)
    others = [row["step_time_ms"] for row in rows if "compiles" not in row]
    summary = run.summary
    assert summary["median_step_ms"] == pytest.approx(statistics.median(others))
    assert (summary["compiling_steps"], summary["compilations"]) == (3, 9)
    assert summary["compile_seconds"] == pytest.approx(0.6)
    for step in (1, 2, 6):
        assert f"compile   step {step}: the device compiled 3 programs in 0.2 s" in run.err
    lines = [line for line in run.err.splitlines() if line.startswith(" iteration")]
    assert "| steps with compilation: 2 (excluded) | ETA:" in lines[0]
    assert "| steps with compilation: 1 (excluded) | ETA:" in lines[1]
    for line, some in zip(lines, (rows[2:4], [rows[4], *rows[6:]]), strict=True):
        mean = statistics.mean(row["step_time_ms"] for row in some)
        assert f"elapsed time per iteration (ms): {mean:.1f} |" in line


def test_only_steps_that_compile(train: Any, compile_in: Any) -> None:
    """There are times, and no speed; the steps are counted all the same."""
    compile_in({1, 2, 3})
    run = train("run", "--train-iters 3 --device cpu")
    assert run.status == 0, run.err
    assert (run.summary["iteration"], run.summary["compiling_steps"]) == (3, 3)
    assert run.summary["median_step_ms"] is run.summary["median_tokens_per_second"] is None
    assert run.err.count("| steps with compilation: 1 (included) |") == 3
    assert "tokens/s" not in run.err
    assert "ETA" not in run.err


def test_a_long_wait_is_announced(
    train: Any, compile_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step compiles, a line says that it runs."""
    monkeypatch.setattr(compilation_watch, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(compilation_watch, "_LOOK_SECONDS", 0.05)
    compile_in({1}, seconds=1.5)
    run = train("run", "--train-iters 2 --device cpu")
    assert run.status == 0, run.err
    waits = run.err.index("compile   step 1 has been running for ")
    assert waits < run.err.index("compile   step 1: the device compiled 3 programs in 1.5 s")


def test_other_devices(train: Any) -> None:
    """A device that does not compile has neither keys nor notices."""
    run = train("run", "--train-iters 2 --device cpu")
    assert not any({"compiles", "compilations"} & set(row) for row in run.rows)
    assert run.summary["compiling_steps"] == 0
    assert run.summary["compilations"] is run.summary["compile_seconds"] is None
    assert "compil" not in run.err
