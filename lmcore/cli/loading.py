"""Options and start-up of the commands that load a model to generate text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.config.option import option
from lmcore.config.section.accelerator import MAX_THREADS, plugin_off_option
from lmcore.config.section.tokenizer import TokenizerSection
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.errors import ConfigError
from lmcore.generation.quantization_options import QUANTIZATIONS, precision_of
from lmcore.runtime.device_choice import choose_device

if TYPE_CHECKING:
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.plugin import PluginSet
    from lmcore.runtime.runtime import Runtime

__all__ = ["LoadingSection", "require_checkpoint", "started_runtime"]


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
    vocab_size: int | None = option(None, "Vocabulary size of a NullTokenizer.", minimum=1)
    tokenizer_type: str | None = option(
        None, "Type of the tokenizer; default: the run's own copy.", metavar="TYPE"
    )

    def tokenizer_choice(self) -> TokenizerSettings:
        """Return the tokenizer that the user named, if any."""
        choice = TokenizerSettings.of(self)
        if choice.tokenizer_type is None and choice.vocab_file and choice.merge_file:
            # As in training: the only type that takes both files.
            return dataclasses.replace(choice, tokenizer_type="GPT2BPETokenizer")
        return choice


@contextmanager
def started_runtime(
    section: LoadingSection, plugins: PluginSet, settings: PluginSettings
) -> Iterator[Runtime]:
    """Choose the device, load torch, and enter a context in which the device is in use.

    Args:
        section: Options of the command.
        plugins: Plugins to choose from.
        settings: Options of the plugins.

    Raises:
        ConfigError, DeviceError: There is no such device, precision or kernel.
    """
    from lmcore.config.section import AcceleratorSection, Config
    from lmcore.runtime.launch.rank import only_process

    rank = only_process(os.environ)
    selection = choose_device(plugins, section.device, rank)
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
    from lmcore.runtime.runtime import start_runtime

    with start_runtime(config, plugins, selection, rank) as runtime:
        yield runtime


def require_checkpoint(path: Path, step: str | None) -> Path:
    """Return the directory to load, before torch is loaded.

    Args:
        path: Path that the user named: a run, a checkpoint, or a directory of another format.
        step: Step of the checkpoint in a run, or `best`; None: the newest.

    Raises:
        CheckpointError, ConfigError: There is no such checkpoint.
    """
    from lmcore.checkpoint import chosen_checkpoint, find_checkpoint
    from lmcore.conversion.detect import format_of
    from lmcore.conversion.unrecognized import unrecognized

    if format_of(path) in {None, "lmcore"}:
        if (problem := unrecognized(path)) is not None:
            raise problem
        find_checkpoint(path)
        return path if step is None else chosen_checkpoint(path, step)
    if step is not None:
        raise ConfigError(
            f"`--ckpt-step` cannot be used with `{path}`",
            why="it is no run of lmcore",
            hint="name the directory of the checkpoint by `--load`",
        )
    return path
