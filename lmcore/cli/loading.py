"""Options and start-up of the commands that load a model to generate text."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base import log
from lmcore.base.errors import ConfigError, counted
from lmcore.base.missing_path import missing_path_hint
from lmcore.cli.device_count import default_process_count
from lmcore.cli.processes import import_torch, leave, start_processes
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.option import option
from lmcore.config.section.accelerator import MAX_THREADS, plugin_off_option
from lmcore.config.section.tokenizer import TokenizerSection
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.generation.options import QUANTIZATIONS, precision_of
from lmcore.runtime.device_choice import prepare_environment, select_device

if TYPE_CHECKING:
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.inference.load import LoadedModel
    from lmcore.model.shape import ModelShape
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.runtime import Runtime

__all__ = [
    "LoadingSection",
    "ProcessPlan",
    "loaded_model",
    "plan_processes",
    "require_checkpoint",
    "run_planned",
    "started_runtime",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadingSection(TokenizerSection):
    """Options of the checkpoint, the device and the tokenizer."""

    ckpt_step: str | None = option(
        None,
        "Step of the checkpoint to load instead of the newest, or `best`: the one of lowest "
        "validation loss.",
        metavar="STEP",
    )
    device: str | None = option(
        None, "Device type, as listed by `lmcore plugins`; default: detected.", metavar="TYPE"
    )
    plugin_off: tuple[str, ...] = plugin_off_option()
    precision: str | None = option(
        None, "Precision policy, such as fp32 or bf16; default: the device's first.", metavar="NAME"
    )
    ops: tuple[str, ...] = option(
        (),
        "Preferred kernels as `op=id,id`; the first that supports the case is used.",
        metavar="OP=ID",
    )
    strict_ops: bool = option(False, "Fail if an op would use the core's reference kernel.")
    deterministic: bool = option(False, "Use only kernels that declare themselves deterministic.")
    quantization: str | None = option(
        None,
        "Round the weights to integers of 8 or 4 bits when they are loaded: less memory, faster "
        "for few samples at a time. The default precision is then bf16.",
        choices=QUANTIZATIONS,
    )
    num_threads: int | None = option(
        None, "CPU threads; default: torch's.", minimum=1, maximum=MAX_THREADS
    )
    tensor_model_parallel_size: int = option(
        1, "Tensor-parallel size: processes that divide each layer's weights.", minimum=1
    )
    pipeline_model_parallel_size: int = option(
        1, "Pipeline-parallel size: processes that divide the layers.", minimum=1
    )
    nproc_per_node: int | None = option(
        None,
        "Processes to start on this host: tensor-parallel times pipeline-parallel size; default: "
        "that number if enough devices are present, otherwise 1. `lmcore evaluate` takes a "
        "multiple: replicas, which divide the requests.",
        minimum=1,
        maximum=4096,
    )
    vocab_size: int | None = option(None, "Vocabulary size of a NullTokenizer.", minimum=1)
    tokenizer_type: str | None = option(
        None, "Type of the tokenizer; default: the run's own copy.", metavar="TYPE"
    )

    def tokenizer_choice(self) -> TokenizerSettings:
        """Return the tokenizer that the user named, if any.

        Raises:
            ConfigError: One of its files is missing.
        """
        choice = TokenizerSettings.of(self)
        named = {"--vocab-file": choice.vocab_file, "--merge-file": choice.merge_file}
        for flag, file in named.items():
            if file is not None and not Path(file).exists():
                raise ConfigError(
                    f"cannot read `{flag} {file}`",
                    why="there is no such file",
                    hint=missing_path_hint(file),
                )
        if choice.tokenizer_type is None and choice.vocab_file and choice.merge_file:
            # As in training: the only type that takes both files.
            return dataclasses.replace(choice, tokenizer_type="GPT2BPETokenizer")
        return choice


@dataclass(frozen=True)
class ProcessPlan:
    """Processes of a command that loads a model.

    Attributes:
        rank: Rank of this process.
        layout: Sizes of the axes `tensor` and `pipeline`, and of `data`: replicas of the model.
        selection: Choice of the device.
    """

    rank: RankInfo
    layout: ParallelLayout
    selection: Selection

    @property
    def starts_processes(self) -> bool:
        """True if this process is to start the others."""
        return self.layout.world_size > self.rank.world_size


def plan_processes(
    section: LoadingSection, plugins: PluginSet, *, replicas: bool = False
) -> ProcessPlan:
    """Return the processes that a model is divided over, before torch is loaded.

    Args:
        section: Options of the command.
        plugins: Plugins to choose from.
        replicas: True if a multiple of the processes of a model have as many replicas of it.

    Raises:
        ConfigError: A launcher, or `--nproc-per-node`, gives another number of processes than the
            sizes.
        DeviceError: There is no such device.
    """
    from lmcore.runtime.launch.rank import only_process, rank_info, started_by_launcher
    from lmcore.runtime.launch.scheduler_env import translate
    from lmcore.runtime.launch.worker_protocol import end_with_launcher

    tensor, pipeline = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    layout, asked = ParallelLayout(tensor=tensor, pipeline=pipeline), section.nproc_per_node
    number = layout.world_size
    product = f"{tensor} (tensor) x {pipeline} (pipeline)"

    def fits(processes: int) -> bool:
        return processes % number == 0 if replicas else processes == number

    several = "a multiple of it for replicas of the model, " if replicas else ""
    if asked is not None and not fits(asked):
        raise ConfigError(
            f"`--nproc-per-node {asked}` contradicts `--tensor-model-parallel-size` and "
            "`--pipeline-model-parallel-size`",
            why=f"they are {product}",
            hint=f"`--nproc-per-node {number}`, {several}or leave it out",
        )
    end_with_launcher(os.environ)
    os.environ.update(translate(os.environ))
    rank = rank_info(os.environ) if number > 1 or replicas else only_process(os.environ)
    if rank.world_size > 1:
        log.configure(rank=rank.rank, world_size=rank.world_size)
    if started_by_launcher(os.environ) and not fits(rank.world_size):
        raise ConfigError(
            f"a launcher started {rank.world_size} of the {number} processes of the model",
            why=f"they are {product}",
            hint=f"start {number}, {several}or change the sizes",
        )
    processes = max(rank.world_size, asked or number)
    layout = dataclasses.replace(layout, data=processes // number)
    selection = select_device(plugins, section.device, rank)
    if rank.world_size < number and asked is None:
        available = default_process_count(plugins, selection, rank)
        if available < number:
            logger.warning(
                "one process loads the whole model: for %s processes there %s; "
                "`--nproc-per-node %d` starts them all the same",
                *(
                    product,
                    f"{'is' if available == 1 else 'are'} {counted(available, 'device')}",
                    number,
                ),
            )
            layout = ParallelLayout()
    return ProcessPlan(rank, layout, selection)


def run_planned(
    argv: Sequence[str],
    plan: ProcessPlan,
    plugins: PluginSet,
    work: Callable[[], None],
    *,
    dialogue: bool = False,
) -> int:
    """Do the work of a command in this process, or start its processes; return the exit status.

    Args:
        argv: Command and its arguments.
        plan: Processes.
        plugins: Plugins that were found.
        work: Function that does the work of one process.
        dialogue: See `launch`.
    """
    if plan.starts_processes:
        return start_processes(
            argv,
            plan.layout.world_size,
            plugins,
            plan.selection,
            module="lmcore.inference.parallel.start",
            dialogue=dialogue,
        )
    work()
    if plan.layout.world_size > 1:
        leave()
    return 0


@contextmanager
def started_runtime(
    section: LoadingSection, plan: ProcessPlan, plugins: PluginSet, settings: PluginSettings
) -> Iterator[Runtime]:
    """Load torch, and enter a context in which the device is in use.

    Several processes compare their settings and are connected.

    Args:
        section: Options of the command.
        plan: Processes of the command.
        plugins: Plugins to choose from.
        settings: Options of the plugins.

    Raises:
        ConfigError, DeviceError: There is no such precision or kernel, or the settings of the
            processes differ.
        RunError: A process stopped.
    """
    from lmcore.config.section import AcceleratorSection, Config

    prepare_environment(plugins, plan.selection, plan.rank)
    import_torch()
    config = Config(
        accelerator=AcceleratorSection(
            device=section.device,
            ops=section.ops,
            strict_ops=section.strict_ops,
            deterministic=section.deterministic,
            precision=precision_of(section.precision, section.quantization),
            num_threads=section.num_threads,
        ),
        plugins=settings,
    )
    from lmcore.runtime.runtime import connect_processes, start_runtime

    own = dataclasses.asdict(section)
    values = json.loads(json.dumps(own, default=str))
    with (
        connect_processes(config, plan.rank, "their settings", values) as rendezvous,
        start_runtime(config, plugins, plan.selection, plan.rank, rendezvous) as runtime,
    ):
        yield runtime


@contextmanager
def loaded_model(
    section: LoadingSection,
    checkpoint: Path,
    plan: ProcessPlan,
    runtime: Runtime,
    plugins: PluginSet,
    *,
    rows: int,
    require: Callable[[ModelShape], None] | None = None,
    check: Callable[[LoadedModel], None] | None = None,
) -> Iterator[LoadedModel | None]:
    """Load a model; yield None, when it is closed, in the processes that only hold a part of it.

    Args:
        section: Options of the command.
        checkpoint: Directory, from `require_checkpoint`.
        plan: Processes of the command.
        runtime: Device, precision and kernels.
        plugins: Plugins, which may register tokenizers.
        rows, require, check: See `load_model`.

    Raises:
        CheckpointError, ConfigError, DataError: See `load_model`.
    """
    from lmcore.data.tokenizer.build import registered_types
    from lmcore.inference.load import load_model
    from lmcore.inference.parallel.start import parallel_model

    choice, extra = section.tokenizer_choice(), registered_types(plugins)
    if plan.layout.tensor * plan.layout.pipeline == 1:

        def load(path: Path) -> LoadedModel:
            return load_model(
                path,
                runtime,
                choice=choice,
                extra=extra,
                rows=rows,
                require=require,
                quantization=section.quantization,
                check=check,
            )

        processes, rank = runtime.processes, plan.rank.rank
        loaded = None if rank else load(checkpoint)
        if processes is not None:
            # All load what rank 0 has found, though a run may write a newer one meanwhile.
            found = None if loaded is None else str(loaded.checkpoint)
            checkpoint = Path(processes.gather(found, "the checkpoint")[0])
        loaded = loaded or load(checkpoint)
        logger.info("loaded %s on %s", loaded.checkpoint, runtime.device.name)
        yield loaded
        return
    with parallel_model(
        checkpoint,
        runtime,
        plan.layout,
        choice=choice,
        extra=extra,
        rows=rows,
        require=require,
        quantization=section.quantization,
        check=check,
    ) as part:
        if part is not None:
            words = f"{part.checkpoint} in {plan.layout.world_size} processes"
            logger.info("loaded %s on %s", words, runtime.device.name)
        yield part


def require_checkpoint(path: Path, step: str | None) -> Path:
    """Return the directory to load, before torch is loaded.

    Args:
        path: Path that the user named: a run, a checkpoint, or a directory of another format.
        step: Step of the checkpoint in a run, or `best`; None: the newest.

    Raises:
        CheckpointError, ConfigError: There is no such checkpoint.
    """
    from lmcore.checkpoint import chosen_checkpoint, find_checkpoint
    from lmcore.conversion.checkpoint_step import foreign_checkpoint
    from lmcore.conversion.formats import unrecognized
    from lmcore.model.checkpoint_format import format_of

    if step is not None and (chosen := foreign_checkpoint(path, step)) is not None:
        return chosen
    if format_of(path) in {None, "lmcore"}:
        if (problem := unrecognized(path)) is not None:
            raise problem
        find_checkpoint(path)
        return path if step is None else chosen_checkpoint(path, step)
    return path
