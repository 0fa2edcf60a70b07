"""A training run from its plan to its summary: the place to see how the framework's parts fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.signals import raise_swallowed_signal
from lmcore.checkpoint import WritePlanner
from lmcore.parallel.random_states import seed_everything
from lmcore.plugin import AUTO
from lmcore.runtime.process.stop_limit import StopLimit
from lmcore.runtime.runtime import connect_processes, start_runtime
from lmcore.train.datasets import build_datasets
from lmcore.train.diagnose.device_health import device_failure_explained
from lmcore.train.diagnose.memory_need import require_memory
from lmcore.train.diagnose.out_of_memory import out_of_memory_explained
from lmcore.train.engine import build_engine
from lmcore.train.exit_conditions import ExitConditions
from lmcore.train.loop import train
from lmcore.train.report.run_report import open_report
from lmcore.train.report.startup_clock import PhaseClock
from lmcore.train.resume.point import verify_resume_point
from lmcore.train.resume.restore import restore
from lmcore.train.resume.save import Saver, Snapshot, take_snapshot
from lmcore.train.resume.saved_run import part_of
from lmcore.train.resume.schedule import check_learning_rate
from lmcore.train.resume.validation_history import ValidationHistory

if TYPE_CHECKING:
    from lmcore.config.plan import ResumePoint, RunPlan
    from lmcore.data.prepare.choose_texts import RunText
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.evaluation.task import Task
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.process.rendezvous import Rendezvous
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import RunDatasets
    from lmcore.train.report.run_result import RunResult
    from lmcore.train.state import TrainState

__all__ = ["run_training"]

_SAME_SETTINGS = "give all processes the same flags and files"


def run_training(
    plan: RunPlan,
    tokenizer: Tokenizer,
    plugins: PluginSet,
    selection: Selection,
    rank: RankInfo,
    clock: PhaseClock | None = None,
    *,
    texts: Mapping[str, RunText] | None = None,
    tasks: Sequence[tuple[Task, Sequence[Path]]] = (),
    stop_limit: StopLimit | None = None,
) -> RunResult:
    """Train a model by *plan* and write a run directory; all processes of the run must call it.

    Args:
        plan: The resolved configuration.
        tokenizer: Tokenizer of the data.
        plugins: Plugins that the launcher found.
        selection: Device that the launcher chose.
        rank: Rank of this process.
        clock: Clock of the start-up phases; None to start one here.
        texts: Named texts of the plan; None for the bundled text only.
        tasks: Tasks of `--eval-tasks`, with their files.
        stop_limit: Limit on the time that this process takes to stop; None for none.

    Raises:
        LmcoreError: A failure that the user can fix; `summary.json` has its status in training.
    """
    raise_swallowed_signal()
    clock, stop_limit = clock or PhaseClock(), stop_limit or StopLimit(0)
    plan = _with_precision(plan, _precision_of(plan.resume))
    with (
        connect_processes(
            plan.config, rank, "their settings", plan.settings, hint=_SAME_SETTINGS
        ) as rendezvous,
        start_runtime(plan.config, plugins, selection, rank, rendezvous) as runtime,
        # The run's files have the precision that was chosen, so that it is kept from now on.
        open_report(
            plan := _with_precision(plan, runtime.precision.name), runtime, plugins, clock
        ) as report,
    ):
        clock.mark("device")
        require_memory(plan, runtime)
        if rendezvous is not None:
            rendezvous.watch.over = stop_limit.request
        directory = report.directory
        plan = dataclasses.replace(plan, resume=verify_resume_point(plan, rendezvous))
        datasets = build_datasets(plan, tokenizer, directory.data, texts, rendezvous, tasks=tasks)
        clock.mark("data")
        seed_everything(plan.config.training.seed, runtime, plan.layout)
        with (
            out_of_memory_explained(plan, runtime),
            build_engine(plan, runtime, report.profile.profiler_range) as engine,
        ):
            state, saving, planner = engine.state, plan.config.checkpoint, WritePlanner(rendezvous)
            checkpoint, history = _restored(state, datasets, plan, runtime, planner)
            engine.begin()
            _name_step(state, runtime, rendezvous, stop_limit)

            def snapshot() -> Snapshot:
                return take_snapshot(
                    *(state, plan, runtime, tokenizer),
                    directory=directory.checkpoints,
                    order=datasets.order,
                    data=datasets.training.record(state.consumed_samples),
                    corpora=datasets.corpora,
                    history=history,
                    planner=planner,
                )

            with (
                report.training(engine, datasets, checkpoint, history, stop_limit),
                device_failure_explained(runtime.device, state),
                # Within the outer context: state and checkpoints are known, for the summary, too.
                out_of_memory_explained(plan, runtime, state, directory.checkpoints),
                _exit_conditions(plan, runtime, clock) as exits,
                Saver(snapshot, background=saving.async_save) as saver,
            ):
                train(engine, datasets, plan, runtime, report, saver, exits, history)
            return report.finish(engine, datasets, checkpoint)


def _with_precision(plan: RunPlan, name: str | None) -> RunPlan:
    """Return the plan with a precision in the place of `auto`; None leaves it."""
    section = plan.config.accelerator
    if section.precision != AUTO or name is None:
        return plan
    section = dataclasses.replace(section, precision=name)
    config = dataclasses.replace(plan.config, accelerator=section)
    return dataclasses.replace(plan, config=config)


def _precision_of(resume: ResumePoint | None) -> str | None:
    """Return the precision that a run has continued with so far; None if it is unknown."""
    if resume is None or resume.foreign:
        return None
    found = part_of(resume.manifest.meta, "config", "config", "accelerator").get("precision")
    return found if isinstance(found, str) else None


def _exit_conditions(plan: RunPlan, runtime: Runtime, clock: PhaseClock) -> ExitConditions:
    return ExitConditions(
        plan.config.training,
        save_minutes=plan.config.checkpoint.save_interval_mins,
        is_main_rank=runtime.rank.rank == 0,
        elapsed=clock.elapsed,
    )


def _restored(
    state: TrainState,
    datasets: RunDatasets,
    plan: RunPlan,
    runtime: Runtime,
    planner: WritePlanner,
) -> tuple[Path | None, ValidationHistory]:
    """Set the state of a run that begins; return the checkpoint and its validation losses."""
    resumed = datasets.training.resumed
    checkpoint = restore(state, plan, runtime, order=resumed, planner=planner)
    check_learning_rate(plan, state)
    return checkpoint, ValidationHistory.announced(plan)


def _name_step(
    state: TrainState, runtime: Runtime, rendezvous: Rendezvous | None, stop_limit: StopLimit
) -> None:
    """Let other ranks, and the error of a call that hangs, name the step of this process."""
    device = runtime.device.torch_device
    stop_limit.activity = lambda: f"step {state.iteration + 1} on `{device}`"
    if rendezvous is not None:
        rendezvous.watch.activity = lambda: f"step {state.iteration + 1}"
