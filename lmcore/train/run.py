"""A training run from its plan to its summary: the place to see how the framework's parts fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcore.checkpoint import WritePlanner
from lmcore.parallel.random_states import seed_everything
from lmcore.runtime.runtime import connect_processes, start_runtime
from lmcore.signals import raise_swallowed_signal
from lmcore.train.datasets import build_datasets
from lmcore.train.diagnose.out_of_memory import out_of_memory_explained
from lmcore.train.engine import build_engine
from lmcore.train.exit_conditions import ExitConditions
from lmcore.train.loop import train
from lmcore.train.report.run_report import RunResult, open_report
from lmcore.train.report.startup_clock import PhaseClock
from lmcore.train.resume.restore import restore
from lmcore.train.resume.resume_point import verify_resume_point
from lmcore.train.resume.same_run import check_learning_rate
from lmcore.train.resume.saver import Saver
from lmcore.train.resume.snapshot import Snapshot, take_snapshot
from lmcore.train.resume.validation_history import ValidationHistory

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.prepare.named_text import NamedText
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo

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
    texts: Mapping[str, NamedText] | None = None,
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

    Raises:
        LmcoreError: A failure that the user can fix; if training had begun, `summary.json` has its
            status.
    """
    raise_swallowed_signal()
    clock = clock or PhaseClock()
    with (
        connect_processes(
            plan.config, rank, "their settings", plan.settings, hint=_SAME_SETTINGS
        ) as rendezvous,
        start_runtime(plan.config, plugins, selection, rank, rendezvous) as runtime,
        open_report(plan, runtime, plugins, clock) as report,
    ):
        clock.mark("device")
        directory = report.directory
        plan = dataclasses.replace(plan, resume=verify_resume_point(plan, rendezvous))
        datasets = build_datasets(plan, tokenizer, directory.data, texts, rendezvous)
        clock.mark("data")
        seed_everything(plan.config.training.seed, runtime, plan.layout)
        with (
            out_of_memory_explained(plan, runtime),
            build_engine(plan, runtime, report.profile.profiler_range) as engine,
        ):
            state, saving, planner = engine.state, plan.config.checkpoint, WritePlanner(rendezvous)
            order, resumed = datasets.order, datasets.resumed_order
            checkpoint = restore(state, plan, runtime, order=resumed, planner=planner)
            check_learning_rate(plan, state.schedule, state.iteration, state.scheduled_samples)
            history = ValidationHistory.announced(plan)
            engine.begin()
            if rendezvous is not None:
                rendezvous.watch.activity = lambda: f"step {state.iteration + 1}"

            def snapshot() -> Snapshot:
                return take_snapshot(
                    state,
                    plan,
                    runtime,
                    tokenizer,
                    directory=directory.checkpoints,
                    order=order,
                    data=datasets.record(state.consumed_samples),
                    history=history,
                    planner=planner,
                )

            with (
                report.training(engine, datasets, checkpoint, history),
                # Within the outer context: now state and checkpoints are known, and the summary
                # gets the explanation.
                out_of_memory_explained(plan, runtime, state, directory.checkpoints),
                ExitConditions(
                    plan.config.training,
                    save_minutes=saving.save_interval_mins,
                    is_main_rank=runtime.rank.rank == 0,
                ) as exits,
                Saver(snapshot, background=saving.async_save) as saver,
            ):
                train(engine, datasets, plan, runtime, report, saver, exits, history)
            return report.finish(engine, datasets, checkpoint)
