"""The loop: when it validates, saves and ends, and what each step reports."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.base.errors import RunError
from lmcore.train.exit_conditions import ExitConditions
from lmcore.train.loop import train
from lmcore.train.report.run_directory import RunDirectory
from lmcore.train.report.run_report import RunReport, failure_status
from lmcore.train.report.startup_clock import PhaseClock
from lmcore.train.resume.validation_history import ValidationHistory
from lmcore.train.step import TrainStep
from lmcore.train.step_record import PendingStep, StepRecord


class Watcher:
    """A display that remembers."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.validations: list[Any] = []

    def say(self, text: str) -> None: ...

    def step(self, row: Any, progress: Any) -> None:
        self.steps.append((row, progress))

    def last_step(self, row: Any, progress: Any) -> None: ...

    def test(self, step: int, result: Any) -> None: ...

    def validation(self, step: int, validation: Any) -> None:
        self.validations.append((step, validation.loss))

    def close(self) -> None: ...


def counted(state: Any, samples: int, loss: float = 1.0) -> StepRecord:
    """Count a step and return its record."""
    return StepRecord.count(state, samples, 16, 1e-3).complete({"lm_loss": float(loss)}, 1.0, ())


@pytest.fixture
def make_report(runtime: Any, tmp_path: Path) -> Callable[..., RunReport]:
    """Makes the report of a plan, with files in the test's folder."""

    def make(plan: Any, display: Any, runtime: Any = runtime) -> RunReport:
        plugins: Any = None  # their hooks are called by `RunReport.training` alone
        directory = RunDirectory(tmp_path)
        return RunReport(plan, runtime, plugins, directory, display, PhaseClock())

    return make


@pytest.fixture
def run_loop(
    make_plan: Any,
    make_state: Any,
    make_datasets: Any,
    make_report: Any,
    runtime: Any,
    tmp_path: Path,
) -> Any:
    """Runs the loop with these flags; returns report, rows, saved steps and display."""

    def run(
        flags: str,
        during: Any = None,
        step_type: Any = TrainStep,
        before: Any = None,
        after_first_step: Any = lambda _: None,
        check: Any = lambda: None,
    ) -> Any:
        plan = make_plan(f"{flags} --no-tensorboard")
        state, display, saved = make_state(plan), Watcher(), []
        if before is not None:
            before(state)

        def save(*, timed: bool = False) -> Path:
            saved.append(state.iteration)
            return Path(f"iter_{state.iteration:07d}")

        saver: Any = SimpleNamespace(save=save, raise_background_error=check)
        report = make_report(plan, display)
        report.first_step = lambda: after_first_step(state)
        report.directory.metrics.unlink(missing_ok=True)
        with report.recording(after_step=0), ExitConditions(plan.config.training) as exits:
            step = step_type(state, plan, runtime)
            if during is not None:
                inner = step

                def step(batches: Any) -> Any:
                    pending = inner(batches)
                    during(state, exits)
                    return pending

            engine: Any = SimpleNamespace(state=state, step=step)
            train(
                engine,
                make_datasets(plan),
                plan,
                runtime,
                report,
                saver,
                exits,
                ValidationHistory(),
            )
        rows = [json.loads(line) for line in report.directory.metrics.read_text().splitlines()]
        return report, rows, saved, display

    return run


def test_plain_run(run_loop: Any) -> None:
    """Every step leaves a row; the last one is followed by a save."""
    report, rows, saved, display = run_loop("--train-iters 6")
    assert report.reason is None
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["consumed_samples"] for row in rows] == [4, 8, 12, 16, 20, 24]
    assert [row["consumed_tokens"] for row in rows] == [64 * i for i in range(1, 7)]
    assert saved == [6]
    assert report.checkpoint == Path("iter_0000006")
    assert len(display.steps) == 6
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_time_ms"] * 1e3)
        assert 0 <= row["data_wait_ms"] <= row["step_time_ms"]


@pytest.mark.parametrize("interval, wanted", [(2, [2, 4, 6]), (4, [4, 6]), (6, [6]), (9, [6])])
def test_saves(run_loop: Any, interval: int, wanted: list[int]) -> None:
    """It saves at every interval and at the end, never twice the same step."""
    assert run_loop(f"--train-iters 6 --save-interval {interval}")[2] == wanted


def test_validations(run_loop: Any) -> None:
    """It validates at every interval and after the last step; the row of the step has the loss."""
    flags = "--train-iters 7 --eval-interval 3 --eval-iters 1 --split 80,20,0"
    report, rows, _, display = run_loop(flags)
    assert [row["step"] for row in rows if "valid_loss" in row] == [3, 6, 7]
    assert [step for step, _ in display.validations] == [3, 6, 7]
    assert report.validation[0] == 7
    assert report.validation[1].loss == rows[-1]["valid_loss"]


def test_validations_see_new_samples(run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each validation takes the samples after the one before's, the last within the plan's."""
    seen = []

    def validate(model: Any, dataset: Any, plan: Any, runtime: Any, **kwargs: Any) -> None:
        seen.append(kwargs["first_sample"])
        assert kwargs["first_sample"] + 8 <= plan.valid_samples

    monkeypatch.setattr("lmcore.train.validation.validate", validate)
    run_loop("--train-iters 7 --eval-interval 3 --eval-iters 2 --split 80,20,0")
    run_loop("--train-iters 6 --eval-interval 3 --eval-iters 2 --split 80,20,0")
    assert seen == [0, 8, 16, 0, 8]


def test_exit_interval(run_loop: Any) -> None:
    """An early exit saves, says why, and validates only where it is due."""
    report, rows, saved, _ = run_loop("--train-iters 9 --exit-interval 4 --save-interval 4")
    assert report.reason == "step 4 is a multiple of --exit-interval 4"
    assert (len(rows), saved) == (4, [4])


def test_exit_at_the_last_step(run_loop: Any) -> None:
    """A run that is over anyway has completed, whatever `--exit-interval` says."""
    report, rows, saved, _ = run_loop("--train-iters 4 --exit-interval 2 --save-interval 9")
    assert (report.reason is None, len(rows), saved) == (False, 2, [2])
    report, rows, saved, _ = run_loop("--train-iters 4 --exit-interval 4")
    assert (report.reason, len(rows), saved) == (None, 4, [4])


def test_signal(run_loop: Any) -> None:
    """A signal during a step ends the run after it, saved, without a validation."""

    def signal_at_3(state: Any, exits: Any) -> None:
        if state.iteration == 3:
            exits.received = signal.SIGTERM

    flags = "--train-iters 9 --eval-interval 3 --eval-iters 1 --split 80,20,0"
    report, rows, saved, display = run_loop(flags, during=signal_at_3)
    assert report.reason == "received SIGTERM"
    assert (len(rows), saved, display.validations) == (3, [3], [])


def test_signal_during_validation(run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes while the run validates ends it there."""
    flags = "--train-iters 9 --eval-interval 3 --eval-iters 4 --split 80,20,0"
    exits_seen = []

    def keep(state: Any, exits: Any) -> None:
        exits_seen.append(exits)

    from lmcore.train.validation import TokenMean

    real, calls = TokenMean.batch, []

    def batch(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if "share" not in kwargs:  # of a validation
            calls.append(1)
            exits_seen[-1].received = signal.SIGINT
        return found

    monkeypatch.setattr(TokenMean, "batch", batch)
    report, rows, saved, _ = run_loop(flags, during=keep)
    assert (report.reason, len(rows), saved, len(calls)) == ("received SIGINT", 3, [3], 1)
    assert "valid_loss" not in rows[-1]


@pytest.mark.parametrize("consumed", [0, 12])
def test_samples_in_order(run_loop: Any, make_plan: Any, make_datasets: Any, consumed: int) -> None:
    """The first step gets the samples after those consumed; none is left out or repeated."""
    seen: list[Any] = []

    class Recorder(TrainStep):
        def __call__(self, batches: Any, *_: Any) -> PendingStep:
            seen.extend(next(batches)["tokens_BS"].tolist())
            return PendingStep.of(counted(self.state, 4))

    def at(state: Any) -> None:
        state.consumed_samples = consumed

    run_loop("--train-iters 5 --exit-interval 2", step_type=Recorder, before=at)
    samples = make_datasets(make_plan("--train-iters 5")).train
    wanted = [samples[i][:-1].tolist() for i in range(consumed, consumed + 8)]
    assert seen == wanted


def test_nothing_to_do(run_loop: Any) -> None:
    """A run that has all its steps behind it takes none and saves nothing."""

    def at_the_end(state: Any) -> None:
        state.iteration, state.consumed_samples = 8, 32

    report, rows, saved, _ = run_loop("--train-iters 8", before=at_the_end)
    assert (rows, saved, report.record, report.checkpoint) == ([], [], None, None)


def test_failure_saves_nothing(run_loop: Any) -> None:
    """A step that fails ends the run without another save."""

    def fail(state: Any, exits: Any) -> None:
        if state.iteration == 5:
            raise RunError("no")

    saves: list[Any] = []
    with pytest.raises(RunError):
        saves = run_loop("--train-iters 9 --save-interval 2", during=fail)
    assert saves == []


def test_failed_write_stops_the_run(run_loop: Any) -> None:
    """The saver's error about an earlier checkpoint is raised before the next step."""
    steps: list[int] = []

    def check() -> None:
        if len(steps) == 3:
            raise RunError("the disk is full")

    with pytest.raises(RunError, match="the disk is full"):
        run_loop(
            "--train-iters 9 --save-interval 2",
            during=lambda state, _: steps.append(state.iteration),
            check=check,
        )
    assert steps == [1, 2, 3]


class TimedStep:
    """A step of a known loss."""

    def __init__(self, state: Any, plan: Any, runtime: Any) -> None:
        self.state, self.plan = state, plan
        self.losses = itertools.count(1)

    def __call__(self, batches: Any) -> PendingStep:
        return PendingStep.of(counted(self.state, self.plan.global_batch_size, next(self.losses)))


def test_lines_are_means(run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line's loss and time are means since the last line; the time left is the typical step's."""
    ticks = iter(itertools.accumulate(itertools.cycle([0.0, 0.1, 0.0, 0.3])))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))  # the loader's thread has its own
    monkeypatch.setattr("lmcore.train.step_queue.time", clock)
    _, _, _, display = run_loop("--train-iters 9 --log-interval 4", step_type=TimedStep)
    due = [(row.step, p) for row, p in display.steps if p.ends_line]
    assert [step for step, _ in due] == [4, 8, 9]
    assert [p.mean_loss for _, p in due] == [2.5, 6.5, 9.0]
    assert [p.mean_step_ms for _, p in due] == pytest.approx([200.0, 200.0, 100.0])
    assert due[0][1].mean_tokens_per_second == pytest.approx(64 / 0.2)
    last = display.steps[-1][1]
    assert last.seconds_left == 0
    assert display.steps[0][1].seconds_left == pytest.approx(8 * 0.1)


def test_rows_of_skipped_steps(run_loop: Any) -> None:
    """Their losses are in no mean, they are counted by line and run, and have no norm."""

    class Skipping(TimedStep):
        def __call__(self, batches: Any) -> PendingStep:
            state, loss = self.state, next(self.losses)
            if state.iteration + 1 not in {2, 3, 4, 7}:
                return PendingStep.of(counted(state, 4, loss))
            state.skipped_iterations += 1
            record = counted(state, 4)
            record.complete({"lm_loss": math.nan if state.iteration == 7 else loss}, None, ())
            return PendingStep.of(dataclasses.replace(record, loss_scale=8.0))

    _, rows, _, display = run_loop("--train-iters 8 --log-interval 2", step_type=Skipping)
    lines = [p for row, p in display.steps if p.ends_line]
    assert [p.mean_loss for p in lines] == [1.0, None, 5.5, 8.0]
    assert [p.skipped_iterations for p in lines] == [1, 2, 0, 1]
    assert [p.nan_iterations for p in lines] == [0, 0, 0, 1]
    assert [row["skipped_iterations"] for row in rows] == [0, 1, 2, 3, 3, 3, 4, 4]
    assert [row["step"] for row in rows if "grad_norm" not in row] == [2, 3, 4, 7]
    assert [row["step"] for row in rows if "loss" not in row] == [7]
    assert rows[1]["loss_scale"] == 8.0


def test_growing_batches(run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, speeds and the time left go by the samples of each step."""
    sizes = (4, 4, 8, 12, 12)

    class Growing(TimedStep):
        def __call__(self, batches: Any) -> PendingStep:
            return PendingStep.of(counted(self.state, sizes[self.state.iteration]))

    ticks = iter(itertools.accumulate(value for size in sizes for value in (0.0, size / 40)))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("lmcore.train.step_queue.time", clock)
    flags = "--train-samples 48 --rampup-batch-size 4 4 16 --global-batch-size 12 --log-interval 3"
    _, rows, _, display = run_loop(flags, step_type=Growing)
    assert [row["global_batch_size"] for row in rows] == list(sizes)
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([40 * 16] * 5)
    # 40 samples at 40 a second, whatever the size of the steps; 8 do not fill another
    left = [(40 - row.consumed_samples) / 40 for row, _ in display.steps]
    assert [p.seconds_left for _, p in display.steps] == pytest.approx(left)
    assert display.steps[2][1].mean_tokens_per_second == pytest.approx(640)
    assert display.steps[2][1].mean_step_ms == pytest.approx(16 / 40 / 3 * 1e3)


def test_mfu(make_plan: Any, runtime: Any, make_state: Any, make_report: Any) -> None:
    """MFU is the model's FLOPs over the peak in the same time; without a peak there is none."""
    plan = make_plan("--no-tensorboard")
    for peak, wanted in ((lambda dtype: 1e9, plan.flops_per_step / 0.5 / 1e9), (None, None)):
        missing = dict(runtime.device.missing) | ({} if peak else {"peak_flops": "unknown"})
        device = dataclasses.replace(runtime.device, peak_flops=peak, missing=missing)
        report = make_report(plan, Watcher(), dataclasses.replace(runtime, device=device))
        record = counted(make_state(plan), plan.global_batch_size)
        record.step_time_ms = 500.0
        with report.recording(after_step=0):
            report.step(record)
        assert record.mfu == wanted


def test_failure_status() -> None:
    """The summary of a failure says what failed, in a line."""
    assert failure_status(RunError("the loss is nan", why="x")) == "failed: the loss is nan"
    assert failure_status(KeyboardInterrupt()) == "interrupted"
    assert failure_status(ZeroDivisionError("by zero")) == "failed: ZeroDivisionError: by zero"


def test_first_step_is_announced_once(run_loop: Any) -> None:
    """`after_first_step` is called once after the first step, and never in a run without steps."""
    seen: list[int] = []

    def note(state: Any) -> None:
        seen.append(state.iteration)

    run_loop("--train-iters 3", after_first_step=note)
    assert seen == [1]
