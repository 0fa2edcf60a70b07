"""The command `lmcore train`: resolves the plan without torch, then starts processes or trains."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base import log
from lmcore.base.errors import ConfigError, DeviceError, LmcoreError, RunError, counted, printable
from lmcore.base.signals import clean_termination
from lmcore.cli.commands import known_commands
from lmcore.cli.device_count import default_process_count
from lmcore.cli.processes import import_torch, leave, start_processes
from lmcore.cli.schedule_question import decide_schedule
from lmcore.cli.selection import find_plugins
from lmcore.cli.streams import outlive_readers
from lmcore.config.continued import is_continued
from lmcore.config.derived.data_source import RunSources
from lmcore.config.options.command_line import wants_help
from lmcore.config.options.help import render_run_help
from lmcore.config.settings import UnreadSettingError, readable
from lmcore.model.family import fills_masks
from lmcore.plugin.registrations import plugin_sections
from lmcore.runtime.device_choice import prepare_environment, select_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lmcore.config.plan import RunPlan
    from lmcore.config.settings import LoadedConfig
    from lmcore.data.prepare.named_text import NamedText
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.train.report.run_report import RunResult
    from lmcore.train.resume.foreign import ForeignModels

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
    from lmcore.config.resolve import resolve
    from lmcore.config.tokenizer import TokenizerIdentity
    from lmcore.config.validate import validate
    from lmcore.data.tokenizer.build import registered_types
    from lmcore.runtime.launch.rank import rank_info
    from lmcore.runtime.launch.scheduler_env import translate
    from lmcore.runtime.launch.worker_protocol import end_with_launcher
    from lmcore.runtime.process.stop_limit import StopLimit
    from lmcore.train.datasets import choose_tokenizer
    from lmcore.train.report.startup_clock import PhaseClock
    from lmcore.train.resume.foreign import ForeignModels
    from lmcore.train.resume.point import (
        find_resume_point,
        refuse_other_family,
        unknown_tokenizer,
    )

    clock, foreign = PhaseClock(), ForeignModels()
    end_with_launcher(os.environ)
    os.environ.update(translate(os.environ))
    rank = rank_info(os.environ)
    log.configure(rank=rank.rank, world_size=rank.world_size)
    plugins = find_plugins(argv)
    loaded = _load(argv, plugins, rank, foreign)
    config, found = loaded.config, _Surroundings(loaded, plugins, rank)
    plugins, sources, selection = found.plugins, found.sources, found.selection
    world_size = found.world_size or rank.world_size
    valid = validate(loaded, world_size=world_size, further=found.problems)
    assert selection is not None  # its absence is among the problems
    continued = is_continued(loaded.provenance)
    starts_anew = loaded.provenance["finetune"].kind != "checkpoint"
    resume = find_resume_point(
        config.checkpoint,
        continued=continued,
        starts_anew=starts_anew,
        foreign=foreign,
        texts=loaded.texts,
    )
    refuse_other_family(loaded, resume)
    copy = None if resume is None else resume.checkpoint.parent.parent / "tokenizer"
    tokenizer = choose_tokenizer(
        config.data,
        sources,
        registered_types(plugins),
        copy=copy,
        of_checkpoint=loaded.provenance["tokenizer_type"].kind == "checkpoint",
        undecided=unknown_tokenizer(config.checkpoint, resume),
    )
    identity = TokenizerIdentity.of(tokenizer)
    plan = resolve(valid, tokenizer=identity, sources=sources, resume=resume)
    if _is_finished(plan, rank):
        return 0
    _refuse_kill_switch(config.training.kill_switch_path)
    if (answer := decide_schedule(plan, os.environ)) is not None:
        return _train(["--schedule", answer, *argv])
    if world_size > rank.world_size:
        return _start_processes(argv, world_size, plugins, selection, plan)
    prepare_environment(plugins, selection, rank)
    clock.mark("launcher")
    with StopLimit(60 * config.training.stop_timeout_minutes) as stop_limit:
        import_torch()  # timed separately: everything below needs it
        clock.mark("import_torch")
        from lmcore.train.run import run_training

        result = run_training(
            *(plan, tokenizer, plugins, selection, rank, clock),
            texts=found.texts,
            stop_limit=stop_limit,
        )
    if rank.rank == 0:
        _report(result, plan)
    if rank.world_size > 1:
        leave()
    return 0


def _load(
    argv: list[str], plugins: PluginSet, rank: RankInfo, foreign: ForeignModels
) -> LoadedConfig:
    """Return the settings of the command line, its files and the checkpoint that it names."""
    from lmcore.config.load import load_config
    from lmcore.runtime.launch.worker_protocol import launch_info
    from lmcore.train.resume.foreign import not_a_run
    from lmcore.train.resume.saved_run import read_saved_settings

    return load_config(
        argv,
        plugins=plugin_sections(plugins),
        saved_settings=read_saved_settings,
        foreign_settings=foreign.settings,
        foreign_run=not_a_run,
        check=lambda loaded: _Surroundings(loaded, plugins, rank).all_problems(),
        announce=not launch_info(os.environ).report_file,
    )


class _Surroundings:
    """Plugins, device, processes and data of a run, as far as its settings could be read.

    Attributes:
        plugins: Plugins of the run.
        sources: Data sources with their metadata.
        selection: Choice of the device; None if there is none.
        texts: Named texts that the run reads.
        world_size: Number of processes; None if it is unknown.
        problems: Missing or wrong parts of them, besides the settings.
    """

    def __init__(self, loaded: LoadedConfig, plugins: PluginSet, rank: RankInfo) -> None:
        self.loaded, self.plugins = loaded, plugins
        self.problems: list[LmcoreError] = []
        self.sources = RunSources(None)
        self.selection: Selection | None = None
        self.texts: Mapping[str, NamedText] = {}
        self.world_size: int | None = None
        for find in (
            *(self._find_plugins, self._find_sources, self._find_device, self._find_texts),
            *(self._count_processes, self._check_torch),
        ):
            with contextlib.suppress(UnreadSettingError):
                find(rank)

    def all_problems(self) -> list[LmcoreError]:
        """Return every problem, of the settings too."""
        from lmcore.config.validate import problems_of

        return [*problems_of(self.loaded, world_size=self.world_size), *self.problems]

    def _find_plugins(self, _rank: RankInfo) -> None:
        self.plugins = self.plugins.without(self.loaded.config.accelerator.plugin_off)  # a file's

    def _find_device(self, rank: RankInfo) -> None:
        try:
            device = self.loaded.config.accelerator.device
            self.selection = select_device(self.plugins, device, rank)
        except DeviceError as problem:
            self.problems.append(problem)

    def _count_processes(self, rank: RankInfo) -> None:
        try:
            self.world_size = _process_count(self.loaded, rank, self.plugins, self.selection)
        except ConfigError as problem:
            self.problems.append(problem)
            self.world_size = rank.world_size

    def _find_sources(self, _rank: RankInfo) -> None:
        from lmcore.data.blend.check import inspect_sources

        self.sources, problems = inspect_sources(self.loaded.sources[0])
        self.problems += problems

    def _find_texts(self, _rank: RankInfo) -> None:
        from lmcore.data.prepare.named_text import named_texts
        from lmcore.train.datasets import choose_texts

        may_be_gone = self.loaded.config.data.lazy_loader
        try:
            self.texts = choose_texts(
                self.sources, named_texts(self.plugins), may_be_gone=may_be_gone
            )
        except LmcoreError as problem:
            self.problems += [problem, *getattr(problem, "others", ())]

    def _check_torch(self, _rank: RankInfo) -> None:
        from lmcore.train.torch_needs import torch_problems

        self.problems += readable(torch_problems(self.loaded))


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


def _process_count(
    loaded: LoadedConfig, rank: RankInfo, plugins: PluginSet, selection: Selection | None
) -> int:
    """Return the number of processes of the run: started by a launcher, or to be started.

    A launcher decides, also if a run that is continued had another number.  Without a launcher and
    `--nproc-per-node` it is the number of devices if processes on them can exchange tensors, else
    one.

    Args:
        loaded: The settings.
        rank: This process's rank.
        plugins: Plugins that were found.
        selection: Choice of the device; None if there is none.

    Raises:
        ConfigError: A launcher started another number of processes than the settings give.
    """
    from lmcore.runtime.launch.rank import started_by_launcher

    asked = loaded.config.parallel.nproc_per_node
    if not started_by_launcher(os.environ):
        if asked or selection is None:
            return asked or 1
        return default_process_count(plugins, selection, rank)
    of_earlier_start = bool(loaded.provenance["nproc_per_node"].origin)  # by a run's file
    if asked not in {None, rank.local_world_size} and not of_earlier_start:
        raise ConfigError(
            f"{loaded.shown('nproc_per_node')}: a launcher started {rank.local_world_size} here",
            why="LOCAL_WORLD_SIZE says so, and the launcher decides",
            hint="leave `--nproc-per-node` to the launcher, or start `lmcore train` without one",
        )
    return rank.world_size


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
    if result.summary["checkpoint"] is None:
        return
    command = f"lmcore generate --load {shlex.quote(str(result.directory))}"
    if result.can_generate:
        yield f"more text       {command} --prompt TEXT"
    elif fills_masks(plan.shape):
        yield f"fill masks      {command} --fill-mask --prompt 'TEXT [MASK] TEXT'"


def _losses(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for the last validation, the best one if it is another, and the test."""
    if summary["valid_loss"] is not None:
        yield f"validation loss {_evaluation(summary, 'valid')}"
    step = summary["best_valid_step"]
    if step is not None and step != summary["valid_step"]:
        yield f"best validation loss {summary['best_valid_loss']:.4f}, at step {step:,}"
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
