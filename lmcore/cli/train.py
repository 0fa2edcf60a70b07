"""The command `lmcore train`: resolves the plan without torch, then starts processes or trains."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base import log
from lmcore.base.errors import ConfigError, RunError, counted, printable
from lmcore.base.signals import clean_termination
from lmcore.cli.commands import known_commands
from lmcore.cli.processes import import_torch, leave, start_on_node, start_processes
from lmcore.cli.schedule_question import decide_schedule
from lmcore.cli.selection import find_plugins
from lmcore.cli.streams import outlive_readers
from lmcore.config.options.command_line import wants_help
from lmcore.config.options.help import render_run_help
from lmcore.model.family import answers_prompts, family_of, fills_masks
from lmcore.plugin.registrations import plugin_sections
from lmcore.runtime.device_choice import prepare_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lmcore.config.plan import RunPlan
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.train.report.run_result import RunResult

__all__ = ["run"]

logger = logging.getLogger(__name__)

_SUMMARY = known_commands()["train"].summary


def run(argv: list[str]) -> int:
    """Run `lmcore train ...` and return the exit status."""
    if wants_help(argv):
        sections = plugin_sections(find_plugins(argv, probe=False))
        print(render_run_help("lmcore train", _SUMMARY, plugins=sections))
        return 0
    # Signals: until training handles them, and afterwards.
    with outlive_readers(), clean_termination():
        return _train(argv)


def _train(argv: list[str]) -> int:
    """Resolve the plan; start the processes of the run, or train in this one."""
    from lmcore.cli.run_plan import plan_run
    from lmcore.runtime.launch.node_place import node_place
    from lmcore.runtime.launch.rank import rank_info
    from lmcore.runtime.launch.scheduler_env import translate
    from lmcore.runtime.launch.worker_protocol import end_with_launcher
    from lmcore.runtime.process.stop_limit import StopLimit
    from lmcore.train.report.startup_clock import PhaseClock

    clock = PhaseClock()
    end_with_launcher(os.environ)
    if (node := node_place(os.environ)) is not None:
        return start_on_node(["train", *argv], node)
    os.environ.update(translate(os.environ))
    rank = rank_info(os.environ)
    log.configure(rank=rank.rank, world_size=rank.world_size)
    planned = plan_run(argv, find_plugins(argv), rank)
    plan, plugins, selection = planned.plan, planned.plugins, planned.selection
    config = plan.config
    if _is_finished(plan, rank):
        return 0
    _refuse_kill_switch(config.training.kill_switch_path)
    if (answer := decide_schedule(plan, os.environ)) is not None:
        return _train(["--schedule", answer, *argv])
    if (world_size := plan.world_size) > rank.world_size:
        return _start_processes(argv, world_size, plugins, selection, plan)
    prepare_environment(plugins, selection, rank)
    clock.mark("launcher")
    with StopLimit(60 * config.training.stop_timeout_minutes) as stop_limit:
        import_torch()  # timed separately: everything below needs it
        clock.mark("import_torch")
        from lmcore.train.run import run_training

        result = run_training(
            *(plan, planned.tokenizer, plugins, selection, rank, clock),
            texts=planned.texts,
            tasks=planned.tasks,
            stop_limit=stop_limit,
        )
    if rank.rank == 0:
        _report(result, plan)
    if rank.world_size > 1:
        leave()
    return 0


def _is_finished(plan: RunPlan, rank: RankInfo) -> bool:
    """Return True if the same run is finished, and print that on rank 0.

    Raises:
        ConfigError: A flag gives fewer steps than the run has done.
    """
    from lmcore.train.resume.ended import finished_run
    from lmcore.train.resume.point import refuse_fewer_steps

    refuse_fewer_steps(plan)
    message = finished_run(plan)
    if message is not None and rank.rank == 0:
        print(message)
    return message is not None


def _refuse_kill_switch(path: str | None) -> None:
    """Refuse to start a run if its kill switch exists; lmcore's launcher does it for all processes.

    A folder that does not exist is a warning: it may be created later.

    Raises:
        ConfigError: It exists.
    """
    from lmcore.runtime.launch.worker_protocol import launch_info

    if path is None or launch_info(os.environ).report_file:
        return
    folder = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120
    if not os.path.exists(path):  # noqa: PTH110 - no error if it cannot be read
        if not os.path.isdir(folder):  # noqa: PTH112
            logger.warning("the folder of the kill switch, `%s`, does not exist", folder)
        return
    raise ConfigError(
        f"the run does not start: the kill switch `{path}` exists",
        why="while the file exists, no run with this `--kill-switch-path` starts",
        hint=f"`rm {shlex.quote(path)}` lets it start",
    )


def _start_processes(
    argv: list[str], num_processes: int, plugins: PluginSet, selection: Selection, plan: RunPlan
) -> int:
    """Start this command once for each process of the run, on the device chosen here.

    If the run fails, the command that continues it is printed last.
    """
    from lmcore.train.resume.ended import ResumeHint

    save, start = plan.config.checkpoint.save, plan.resume
    hint = ResumeHint(Path(save) if save else None, start.checkpoint if start else None)

    def show_continuation(directory: Path) -> None:
        here = Path.cwd()
        inside = directory.is_relative_to(here)
        line = hint.line(directory.relative_to(here) if inside else directory)
        if line is not None:
            sys.stderr.write(printable(f"\n{line}\n"))

    return start_processes(
        ["train", *argv],
        num_processes,
        plugins,
        selection,
        module="lmcore.train.run",
        failed=show_continuation,
    )


def _report(result: RunResult, plan: RunPlan) -> None:
    """Print the result of a run.

    Raises:
        RunError: All steps were skipped at a fixed loss scale: no weight was ever updated.
    """
    from lmcore.train.resume.ended import nothing_left

    summary = result.summary
    if result.unchanged:
        print(nothing_left(result.directory, summary, plan.length_option))
        return
    lines = []
    if result.sample is not None:
        # A byte model may write any byte; `summary.json` has the text unchanged.
        text = result.sample.prompt + result.sample.text
        lines += ["", "sample:", "", text, ""]
    ended = "" if result.status == "completed" else f" ({result.status})"
    total = summary["iteration"]
    earlier = "" if result.steps == total else f", {total:,} in the whole run"
    skipped = summary.get("skipped_iterations")
    if skipped:
        ended += f"; {total - skipped:,} of {total:,} steps updated the weights"
    lines.append(f"{counted(result.steps, 'step')} in {summary['duration']}{earlier}{ended}")
    lines += _losses(summary)
    lines.append(f"run directory   {result.directory}")
    if summary["checkpoint"] is not None:
        lines.append(f"checkpoint      {summary['checkpoint']}")
    if result.continues is not None:
        lines.append(f"continue        {result.continues}")
    lines += _example(result, plan)
    sys.stdout.write(printable("\n".join(lines)) + "\n")
    if result.untrained:
        raise RunError(
            "no step updated the weights",
            why="loss or gradients overflowed in each step at the loss scale, which is fixed",
            hint="give a lower `--loss-scale`; leave it out for a scale that falls by itself; or "
            "use `--precision bf16`",
        )
    if total and skipped == total and result.status == "completed":
        logger.warning(
            "no step updated the weights: the loss scale began at %g, falls with each skipped "
            "step, and is still too high; train more steps, or give a lower "
            "`--initial-loss-scale`",
            plan.config.accelerator.initial_loss_scale,
        )


def _example(result: RunResult, plan: RunPlan) -> Iterator[str]:
    """Yield a command that shows what the model has learned, if there is one."""
    checkpoint = result.summary["checkpoint"]
    if checkpoint is None or not Path(checkpoint).is_relative_to(result.directory):
        return  # none, or the one that a run without an own checkpoint began with
    command = f"lmcore generate --load {shlex.quote(str(result.directory))}"
    if result.can_generate:
        yield f"more text       {command} --prompt TEXT"
    elif answers_prompts(plan.shape):
        yield f"answers         {command} --prompt TEXT"
    elif fills_masks(plan.shape):
        yield f"fill masks      {command} --fill-mask --prompt 'TEXT [MASK] TEXT'"
    elif family_of(plan.shape).name == "ICT":
        build = f"lmcore index build {shlex.quote(str(result.directory))}"
        yield f"find blocks     {build} --data-path PREFIX --output DIR"


def _losses(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for the last validation, the best one if it is another, and the test."""
    if summary["valid_loss"] is not None:
        yield f"validation loss {_evaluation(summary, 'valid')}"
    for name, values in (summary.get("valid_sets") or {}).items():
        found = {f"valid_{key}": value for key, value in values.items()}
        yield f"  on {name}: {_evaluation({'valid_perplexity': None, **found}, 'valid')}"
    step = summary["best_valid_step"]
    if step is not None and step != summary["valid_step"]:
        yield f"best validation loss {summary['best_valid_loss']:.4f}, at step {step:,}"
    for task, values in (summary.get("tasks") or {}).items():
        shown = [
            f"{name} {value:.4f}"
            for name, value in values.items()
            if value is not None and name != "examples" and not name.endswith("_error")
        ]
        yield f"{task:<15} {', '.join(shown)}"
    if summary["test_loss"] is not None:
        yield f"test loss {_evaluation(summary, 'test')}"


def _evaluation(summary: Mapping[str, Any], part: str) -> str:
    """Return the loss, each of several, the perplexity if one is of tokens, and accuracies."""
    from lmcore.train.report.display import evaluation_detail

    own = {
        name.removeprefix(f"{part}_"): value
        for name, value in summary.items()
        if name.startswith(f"{part}_")
    }
    losses = {name: value for name, value in own.items() if name.endswith("_loss")}
    accuracies = {name: value for name, value in own.items() if name.endswith("_accuracy")}
    return f"{own['loss']:.4f}{evaluation_detail(losses, own['perplexity'], accuracies)}"
