"""Plan of a run from the arguments of a command, with its plugins, device, data and tokenizer.

Torch is not loaded.  `lmcore train` starts what is planned here; other commands read the plan of a
run that is still to start.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, DeviceError, LmcoreError
from lmcore.cli.device_count import default_process_count
from lmcore.config.continued import is_continued
from lmcore.config.derived.data_source import RunSources
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.settings import UnreadSettingError, readable
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import problems_of, validate
from lmcore.data.blend.check import inspect_sources
from lmcore.data.prepare.choose_texts import choose_texts
from lmcore.data.prepare.named_text import named_texts
from lmcore.data.tokenizer.build import registered_types
from lmcore.plugin.registrations import plugin_sections
from lmcore.runtime.device_choice import select_device
from lmcore.runtime.launch.rank import started_by_launcher
from lmcore.runtime.launch.worker_protocol import launch_info
from lmcore.train.datasets import choose_tokenizer
from lmcore.train.resume.foreign import ForeignModels, not_a_run
from lmcore.train.resume.point import find_resume_point, refuse_other_family, unknown_tokenizer
from lmcore.train.resume.saved_run import read_saved_settings
from lmcore.train.torch_needs import torch_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from lmcore.config.plan import RunPlan
    from lmcore.config.plugin_section import PluginSections
    from lmcore.config.settings import LoadedConfig
    from lmcore.data.prepare.choose_texts import RunText
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.evaluation.task import Task
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo

__all__ = ["PlannedRun", "plan_run"]


@dataclass(frozen=True)
class PlannedRun:
    """Plan of a run, and what it was planned with.

    Attributes:
        plan: The plan.
        tokenizer: Tokenizer of the data.
        plugins: Plugins of the run.
        selection: Choice of the device.
        texts: Texts that the run reads.
        tasks: Tasks that score the model in training, with their files.
    """

    plan: RunPlan
    tokenizer: Tokenizer
    plugins: PluginSet
    selection: Selection
    texts: Mapping[str, RunText]
    tasks: Sequence[tuple[Task, Sequence[Path]]] = ()


def plan_run(
    argv: Sequence[str],
    plugins: PluginSet,
    rank: RankInfo,
    sections: PluginSections | None = None,
) -> PlannedRun:
    """Return the plan of the run that the arguments of `lmcore train` describe.

    Args:
        argv: The arguments.
        plugins: Plugins that were found.
        rank: Rank of this process.
        sections: Sections beside the core's; None: the plugins'.

    Raises:
        LmcoreError: Every problem of settings, data, device and checkpoint.
    """
    foreign = ForeignModels()
    sections = plugin_sections(plugins) if sections is None else sections
    loaded = load_config(
        argv,
        plugins=sections,
        saved_settings=read_saved_settings,
        foreign_settings=foreign.settings,
        foreign_run=not_a_run,
        check=lambda loaded: _Surroundings(loaded, plugins, rank).all_problems(),
        announce=not launch_info(os.environ).report_file,
    )
    config, found = loaded.config, _Surroundings(loaded, plugins, rank)
    world_size = found.world_size or rank.world_size
    valid = validate(
        loaded, world_size=world_size, further=found.problems, processes_hint=_processes_hint()
    )
    assert found.selection is not None  # its absence is among the problems
    resume = find_resume_point(
        config.checkpoint,
        continued=is_continued(loaded.provenance),
        foreign=foreign,
    )
    refuse_other_family(loaded, resume)
    copy = None if resume is None else resume.checkpoint.parent.parent / "tokenizer"
    tokenizer = choose_tokenizer(
        config.data,
        found.sources,
        registered_types(found.plugins),
        copy=copy,
        of_checkpoint=loaded.provenance["tokenizer_type"].kind == "checkpoint",
        undecided=unknown_tokenizer(config.checkpoint, resume, config.task.task),
    )
    identity = TokenizerIdentity.of(tokenizer)
    plan = resolve(valid, tokenizer=identity, sources=found.sources, resume=resume)
    return PlannedRun(plan, tokenizer, found.plugins, found.selection, found.texts, found.tasks)


class _Surroundings:
    """Plugins, device, processes and data of a run, as far as its settings could be read.

    Attributes:
        plugins: Plugins of the run.
        sources: Data sources with their metadata.
        selection: Choice of the device; None if there is none.
        texts: Texts that the run reads.
        tasks: Tasks that score the model in training, with their files.
        world_size: Number of processes; None if it is unknown.
        problems: Missing or wrong parts of them, besides the settings.
    """

    def __init__(self, loaded: LoadedConfig, plugins: PluginSet, rank: RankInfo) -> None:
        self.loaded, self.plugins = loaded, plugins
        self.problems: list[LmcoreError] = []
        self.sources = RunSources(None)
        self.selection: Selection | None = None
        self.texts: Mapping[str, RunText] = {}
        self.tasks: Sequence[tuple[Task, Sequence[Path]]] = ()
        self.world_size: int | None = None
        for find in (
            *(self._find_plugins, self._find_sources, self._find_device, self._find_texts),
            *(self._find_tasks, self._count_processes, self._check_torch),
        ):
            with contextlib.suppress(UnreadSettingError):
                find(rank)

    def all_problems(self) -> list[LmcoreError]:
        """Return every problem, of the settings too."""
        found = problems_of(
            self.loaded, world_size=self.world_size, processes_hint=_processes_hint()
        )
        return [*found, *self.problems]

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
        self.sources, problems = inspect_sources(self.loaded.sources[0])
        self.problems += problems

    def _find_texts(self, _rank: RankInfo) -> None:
        data = self.loaded.config.data
        try:
            self.texts = choose_texts(
                *(self.sources, named_texts(self.plugins), data.corpora),
                may_be_gone=data.lazy_loader,
            )
        except LmcoreError as problem:
            self.problems += [problem, *getattr(problem, "others", ())]

    def _find_tasks(self, _rank: RankInfo) -> None:
        settings = self.loaded.config.evaluation
        names, data = settings.eval_tasks, settings.eval_tasks_data
        if not names:
            return
        from lmcore.evaluation.chosen import chosen_tasks
        from lmcore.evaluation.plugin_tasks import known_tasks

        try:
            known = known_tasks(self.plugins).all
            self.tasks = chosen_tasks(names, data, known, flag="--eval-tasks")
        except LmcoreError as problem:
            self.problems.append(problem)

    def _check_torch(self, _rank: RankInfo) -> None:
        self.problems += readable(torch_problems(self.loaded))


def _processes_hint() -> Callable[[int], str] | None:
    """Return the hint for `problems_of`: a launcher counts the processes, if one started them."""
    if not started_by_launcher(os.environ):
        return None
    return "let the launcher start a multiple of {} processes".format


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
