"""`RunReport`: everything that only observes a run, from its start to its summary.

It owns the run directory, the display, `metrics.jsonl`, the loggers, the profile and the plugins'
run hooks.  Rank 0 writes files and shows lines; the other ranks profile and call hooks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import RunError
from lmcore.config.continued import continue_command
from lmcore.config.file.run_file import write_run_file
from lmcore.config.rules.needs import note_without_effect
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.logger.run_loggers import RunLoggers
from lmcore.model.run_logger import LoggedRun
from lmcore.optim.loss_scale import DynamicLossScale
from lmcore.plugin import run_end, run_start
from lmcore.runtime.launch.worker_protocol import failure_status, launch_info, name_summary
from lmcore.train.diagnose.non_finite import NonFiniteError
from lmcore.train.diagnose.replica_drift import ReplicaDriftError
from lmcore.train.report.announcement import announcement, header_lines
from lmcore.train.report.compilation_watch import CompilationWatch
from lmcore.train.report.display import Display, duration
from lmcore.train.report.display_choice import open_display
from lmcore.train.report.metrics import MetricsFile
from lmcore.train.report.profiler import Profile
from lmcore.train.report.run_directory import RunDirectory, plugins_of_run
from lmcore.train.report.run_result import UNTRAINED, RunResult
from lmcore.train.report.sample import can_generate, take_sample
from lmcore.train.report.speed import Speed
from lmcore.train.report.startup_clock import PhaseClock
from lmcore.train.report.step_metrics import step_metrics
from lmcore.train.resume.ended import ResumeHint, finished_summary
from lmcore.train.resume.validation_history import ValidationHistory

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.plugin import PluginSet
    from lmcore.runtime.process.stop_limit import StopLimit
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import RunDatasets
    from lmcore.train.engine import Engine
    from lmcore.train.state import TrainState
    from lmcore.train.step_record import StepRecord
    from lmcore.train.task_scores import TaskScores
    from lmcore.train.validation import Validation

__all__ = ["RunReport", "open_report"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Time between two looks at the place of the run directory."""


@contextlib.contextmanager
def open_report(
    plan: RunPlan, runtime: Runtime, plugins: PluginSet, clock: PhaseClock
) -> Iterator[RunReport]:
    """Create and lock the run directory, and open the display; all processes must call it.

    The directory of a run that fails before training is removed again.

    Args:
        plan: The run.
        runtime: This process, connected with the other ranks.
        plugins: Plugins whose hooks are called at start and end of training.
        clock: Clock of the start-up phases.

    Raises:
        ConfigError: `--save` names another run's directory, or one that a live run writes to.
        RunError: The directory cannot be created.
    """
    with contextlib.ExitStack() as stack:
        directory = RunDirectory.of_run(plan, runtime, stack)
        display = open_display(plan.config.logging.progress if runtime.rank.rank == 0 else "none")
        stack.callback(display.close)
        report = RunReport(plan, runtime, plugins, directory, display, clock)
        stack.callback(report.close_loggers)
        yield report


class RunReport:
    """The report of a run.

    Attributes:
        directory: The run directory.
        display: Display for the user.
        compilation: Watch over what is compiled in the steps.
        clock: Clock of the start-up phases.
        profile: Profile of the run; disabled without `--profile`.
        is_main_rank: True on rank 0, which writes the files.
        reason: Reason for an end before the last step; None without one.
        untrained: True if all steps of the run were skipped at a fixed loss scale.
        checkpoint: The last checkpoint that was saved; None before the first.
        test: Evaluation of the test set; None without one.
        record: Record of the last step; None before the first.
        validation: Step and result of the last validation; None before the first.
        scores: Step and result of the last scores of tasks; None before the first.
    """

    def __init__(
        self,
        plan: RunPlan,
        runtime: Runtime,
        plugins: PluginSet,
        directory: RunDirectory,
        display: Display,
        clock: PhaseClock,
    ) -> None:
        """Report nothing yet.

        Args:
            plan: The run.
            runtime: Device, precision and rank.
            plugins: Plugins whose hooks are called at start and end of training.
            directory: The run directory.
            display: Display for the user.
            clock: Clock of the start-up phases.
        """
        self.plan, self.runtime, self.plugins = plan, runtime, plugins
        self.directory, self.display, self.clock = directory, display, clock
        self.profile = Profile(
            plan.config.profile,
            directory.profile,
            device_type=runtime.device.type,
            rank=runtime.rank.rank,
            say=display.say,
        )
        self.compilation = CompilationWatch(plan, runtime.device, display.say)
        self.is_main_rank = runtime.rank.rank == 0
        self.reason: str | None = None
        self.checkpoint: Path | None = None
        self.test: Validation | None = None
        self.record: StepRecord | None = None
        self.validation: tuple[int, Validation] | None = None
        self.scores: tuple[int, TaskScores] | None = None
        self._task_seconds, self._failure = 0.0, "failed"
        self.untrained = False
        self._began = time.monotonic()
        self._finished: dict[str, Any] | None = None  # summary of a run that was finished before
        self._last_row: Mapping[str, Any] = {}  # of the run before this session
        self._speed = Speed(plan, runtime)
        self._history = ValidationHistory()
        self._describe: Callable[[], None] = lambda: None
        self._metrics: MetricsFile | None = None
        self._looked = 0.0  # when the directory was last seen in its place
        self._loggers: RunLoggers | None = None

    @property
    def status(self) -> str:
        """Status of a run that ended: "completed", the reason for an early end, or a failure."""
        return self.reason or (UNTRAINED if self.untrained else "completed")

    @contextlib.contextmanager
    def training(
        self,
        engine: Engine,
        datasets: RunDatasets,
        checkpoint: Path | None,
        history: ValidationHistory,
        stop_limit: StopLimit,
    ) -> Iterator[None]:
        """Report the start of training, each step, and how training ends, failures included.

        Args:
            engine: The engine, ready for its first step.
            datasets: Datasets of the run.
            checkpoint: The checkpoint that was loaded; None if the weights are initial.
            history: Validation losses of the run.
            stop_limit: Limit on the time that this process takes to stop.
        """
        self._history = history
        plan, state, rank = self.plan, engine.state, self.runtime.rank
        self._describe = functools.partial(self._write_description, engine, datasets)
        self._finished = finished_summary(plan, self.directory.path, state.iteration, history)
        if self.is_main_rank and self._finished is None:
            self._describe()
            summary = self.directory.path / "summary.json"
            summary.unlink(missing_ok=True)  # of an earlier start, which this one continues
            name_summary(summary, os.environ)
        self._announce(datasets, checkpoint, state)
        hint = ResumeHint(self.directory.path, checkpoint)
        facts = {
            "directory": str(self.directory.path),
            "rank": rank.rank,
            "world_size": rank.world_size,
            "plan": plan.to_dict(),
        }
        with self.runtime.device.rng_tracker().preserved():
            run_start(self.plugins, self.runtime.selection, facts)
        self.clock.mark("model")

        def fail(error: BaseException) -> str:
            status = self._failure = failure_status(error)
            self._write_failure(state, status)
            self._name_continuation(error, hint)
            return status

        status, stop_limit.ended = "failed", fail
        try:
            with self.recording(after_step=state.iteration):
                yield
            if state.iteration and state.skipped_iterations >= state.iteration:
                # A dynamic scale still falls: a longer run would train.
                self.untrained = not isinstance(state.loss_scale, DynamicLossScale)
            status = self.status
        except BaseException as error:
            # A checkpoint of its own is named by `_name_continuation`.
            elsewhere = None if self.directory.has_checkpoints() else checkpoint
            if elsewhere and isinstance(error, (NonFiniteError, ReplicaDriftError)):
                error.hint = f"{error.hint}; continue from `{elsewhere}`"
            status = fail(error)
            stop_limit.request(f"its end ({status})")  # the device may hang in what follows
            raise
        finally:
            self.display.close()
            ending = {"status": status, "iteration": state.iteration}
            run_end(self.plugins, self.runtime.selection, facts | ending)

    def _write_description(self, engine: Engine, datasets: RunDatasets) -> None:
        """Write the files that are known before the first step."""
        directory, plan = self.directory, self.plan
        directory.write_text("config.yaml", write_run_file(plan, directory.path))
        plugins = plugins_of_run(plan, self.runtime, self.plugins, datasets.tokenizer.name)
        directory.write_json("environment.json", self.runtime.environment() | {"plugins": plugins})
        products = engine.state.model.products
        counts = {} if products is None else {"products": products.to_list()}
        directory.write_json("kernels.json", self.runtime.ops.to_dict() | counts)
        for name, content in engine.run_files.items():
            directory.write_json(name, content)
        # The tokenizer of a run that failed before its first checkpoint is replaced.
        replace = not directory.has_checkpoints()
        save_tokenizer(datasets.tokenizer, directory.tokenizer, replace=replace)

    def _announce(self, datasets: RunDatasets, checkpoint: Path | None, state: TrainState) -> None:
        """Show what the run is; nothing of a finished one, which trains and writes nothing."""
        if self._finished is not None:
            return
        plan, runtime = self.plan, self.runtime
        note = note_without_effect(
            plan, layout=plan.layout, loss_scaling=runtime.precision.loss_scaling
        )
        if note is not None:
            logger.info("%s", note)
        for blend in plan.sources.blends():
            if blend.note:
                logger.info("%s", blend.note)
        for line in announcement(
            plan,
            runtime,
            datasets,
            directory=self.directory.path,
            checkpoint=checkpoint,
            step=state.iteration,
            schedule=state.schedule,
            products=state.model.products,
        ):
            width = self.display.width
            self.display.say(line if width is None else header_lines(line, width))
        if state.iteration >= plan.train_iters and self.is_main_rank:
            logger.warning(
                "nothing is left to train: the checkpoint is of step %d, the run ends at step %d",
                state.iteration,
                plan.train_iters,
            )

    @contextlib.contextmanager
    def recording(self, *, after_step: int) -> Iterator[None]:
        """Open metrics file and profile within the context, and loggers until the report's end.

        Args:
            after_step: Number of steps done; rows of later steps are removed from the file.
        """
        device = self.runtime.device
        with contextlib.ExitStack() as stack:
            if self.is_main_rank and self._finished is None:
                metrics = MetricsFile(self.directory.metrics, after_step=after_step)
                self._metrics = stack.enter_context(metrics)
                self._last_row = metrics.last_row
                path, settings = self.directory.path, self.plan.to_dict()["config"]
                name, config = path.resolve().name, self.plan.config
                self._loggers = RunLoggers(LoggedRun(path, name, config, settings, after_step))
                # On rank 0 only: the peak may have to be measured.
                if device.peak_flops:
                    peak = device.peak_flops(self.runtime.precision.compute)
                    self._speed.peak = peak * self.plan.world_size if peak else None
                stack.enter_context(self.compilation.announcing())
            stack.enter_context(self.profile)
            yield
            self._keep_directory()

    def first_step(self) -> None:
        """Report that the first step, which compiles, is done."""
        self.clock.mark("first_step")
        if self.compilation.blocks:
            took = self.clock.seconds["first_step"]
            self.display.say(f"compile   the first step took {took:.1f} s, compiling included")

    def step(
        self,
        record: StepRecord,
        validation: Validation | None = None,
        scores: TaskScores | None = None,
    ) -> None:
        """Complete the record of a step by speed, validation and scores; write and show it.

        Args:
            record: Record of the step, with its times.
            validation: Validation after the step; None without one.
            scores: Scores of tasks after the step; None without them.
        """
        self._speed.complete(record)
        if validation is not None:
            record.valid_loss, record.valid_perplexity = validation.loss, validation.perplexity
            record.valid = validation.further
            record.valid_sets = {name: one.numbers for name, one in validation.sets.items()}
            self.validation = (record.step, validation)
        if scores is not None:
            record.tasks = {name: dict(values) for name, values in scores.values.items()}
            record.task_seconds = round(scores.seconds, 3)
            self.scores = (record.step, scores)
            self._task_seconds += scores.seconds
        self.record = record
        if time.monotonic() > self._looked + _LOOK_SECONDS:
            self._keep_directory()
        self._write(record)
        progress = self._speed.progress(record)
        self.compilation.show(record, with_line=progress.ends_line)
        self.display.step(record, progress)
        if validation is not None:
            self.display.validation(record.step, validation)
        if scores is not None:
            self.display.tasks(record.step, scores)

    def _write(self, record: StepRecord) -> None:
        """Write the row of a step, and log it at the interval and with validation and scores."""
        if self._metrics is None or self._loggers is None:
            return
        self._metrics.write(record)
        settings = self.plan.config.logging
        due = record.step % settings.tensorboard_log_interval == 0
        if due or record.valid_loss is not None or record.tasks:
            self._loggers.log(step_metrics(record, settings.tensorboard_tags))

    def close_loggers(self, status: str | None = None) -> dict[str, dict[str, float]]:
        """Close the loggers, if they are open; return their numbers for the summary.

        Args:
            status: "completed", or the reason for its end; None: it failed.
        """
        loggers, self._loggers = self._loggers, None
        return {} if loggers is None else loggers.close(status or self._failure)

    def end_steps(self) -> None:
        """Show a training line of the steps since the last one, if the run ended between two."""
        self.compilation.show_pending()
        if self.record is not None:
            progress = self._speed.last_progress(self.record)
            if progress is not None:
                self.display.last_step(self.record, progress)

    def _keep_directory(self) -> None:
        """Create the run directory again, with its files, if it was removed or renamed.

        Its lock is taken again if the lock file was removed.

        Raises:
            ConfigError: Another run writes to a directory of the same path.
            RunError: The directory cannot be created.
        """
        self._looked = time.monotonic()
        if self._metrics is None:
            return
        if self._metrics.is_in_place():
            if not self.directory.is_locked():
                self.directory.create_again()  # the lock file was removed, or is another run's
            return
        logger.warning(
            "the run directory `%s` was removed or renamed: creating it again, with configuration, "
            "tokenizer and all rows of metrics.jsonl; earlier checkpoints and events are not in it",
            self.directory.path,
        )
        self.directory.create_again()
        self._describe()
        self._metrics.write_again()
        if self._loggers is not None:
            self._loggers.directory_lost()

    def test_result(self, step: int, test: Validation | None) -> None:
        """Show the evaluation of the test set after *step*, if there was one."""
        self.test = test
        if test is not None:
            self.display.test(step, test)

    def _write_failure(self, state: TrainState, status: str) -> None:
        if not self.is_main_rank:
            return
        try:
            self.directory.write_json("summary.json", {"status": status, **state.counters()})
        except RunError as error:  # the failure itself matters more
            logger.warning("%s", error)

    def _name_continuation(self, error: BaseException, hint: ResumeHint) -> None:
        """Add the command that continues the run to *error*; lmcore's launcher prints it itself."""
        if self.is_main_rank and not launch_info(os.environ).report_file:
            line = hint.line(self.directory.path)
            if line is not None:
                error.add_note(line)

    def finish(self, engine: Engine, datasets: RunDatasets, loaded: Path | None) -> RunResult:
        """Write the summary and, after a complete run, the sample text; return the result.

        Args:
            engine: The engine after training.
            datasets: Datasets of the run.
            loaded: The checkpoint that was loaded; None if the weights were initial.
        """
        generates, steps = can_generate(engine.state.model), self._speed.num_steps
        result = functools.partial(RunResult, self.directory.path, self.status, steps)
        if self._finished is not None:
            return result(self._finished, None, generates, unchanged=True)
        summary, sample = self._summary(engine.state, self.checkpoint or loaded), None
        if self.is_main_rank:
            try:
                if self.status == "completed":  # a user who ends a run early wants it to end
                    checkpoint = self.checkpoint or loaded
                    sample = take_sample(engine, datasets, self.plan, self.runtime, checkpoint)
                if sample is not None:
                    summary["sample"] = {"prompt": sample.prompt, "text": sample.text}
                    if self._loggers is not None:
                        text = sample.prompt + sample.text
                        self._loggers.text("sample", text, engine.state.iteration)
            finally:
                if numbers := self.close_loggers(self.status):
                    summary["loggers"] = numbers
                # Once: a run that is killed between two writes would end without its sample.
                self.directory.write_json("summary.json", summary)
        return result(summary, sample, generates, self._continue_command(engine.state.iteration))

    def _continue_command(self, step: int) -> str | None:
        """Return the command that continues a run that ended early, if it has a checkpoint.

        Args:
            step: Number of steps done.
        """
        if self.reason is None or not self.directory.has_checkpoints():
            return None
        stopped = self.reason == self._history.early_stop_reason(self.plan, step)
        return continue_command(self.directory.path) + (" --early-stop none" if stopped else "")

    def _summary(self, state: TrainState, checkpoint: Path | None) -> dict[str, Any]:
        memory, seconds = self.runtime.device.memory_stats, time.monotonic() - self._began
        step, validation = self.validation or (None, None)
        compiled = self.compilation.total
        scores_step, scores = self.scores or (None, None)
        # If there was nothing left to train, the last numbers are in `metrics.jsonl`.
        before = self._last_row if self.record is None else {}
        return {
            "status": self.status,
            **state.counters(),
            "train_iters": self.plan.train_iters,
            "loss": self.record.loss if self.record else before.get("loss"),
            "valid_loss": validation.loss if validation else before.get("valid_loss"),
            "valid_step": before.get("step") if "valid_loss" in before else step,
            "valid_perplexity": validation.perplexity
            if validation
            else before.get("valid_perplexity"),
            "valid_sets": {name: one.numbers for name, one in validation.sets.items()} or None
            if validation
            else before.get("valid_sets"),
            "best_valid_loss": self._history.best_loss,
            "best_valid_step": self._history.best_step,
            "test_loss": self.test.loss if self.test else None,
            "test_perplexity": self.test.perplexity if self.test else None,
            **(validation.named("valid") if validation else {}),
            **(self.test.named("test") if self.test else {}),
            "tasks": scores.values if scores else before.get("tasks"),
            "tasks_step": before.get("step") if "tasks" in before else scores_step,
            "task_seconds": round(self._task_seconds, 3) if scores else before.get("task_seconds"),
            "parameter_count": self.plan.parameter_count,
            **self._speed.summary(),
            "compilations": compiled.count if compiled else None,
            "compile_seconds": compiled.seconds if compiled else None,
            "startup_seconds": self.clock.seconds,
            "seconds": seconds,
            "duration": duration(seconds),
            "peak_memory_bytes": memory().peak_allocated if memory else None,
            "checkpoint": str(checkpoint) if checkpoint else None,
            "sample": None,
        }
