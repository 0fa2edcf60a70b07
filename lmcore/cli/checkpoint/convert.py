"""`lmcore checkpoint convert`: write a checkpoint in another format."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, counted, printable
from lmcore.base.signals import clean_termination
from lmcore.cli.selection import find_plugins
from lmcore.cli.text.terminal import size_text
from lmcore.config.foreign.convert import convert_flags, tool_arguments
from lmcore.config.option import REQUIRED, option, options_of
from lmcore.config.options.command_line import parse_section, wants_help
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.config.section.tokenizer import TokenizerSection
from lmcore.config.tokenizer import TokenizerSettings, example_flags
from lmcore.conversion.formats import WriteOptions
from lmcore.model.checkpoint_format import OWN_FORMATS, formats, named_format
from lmcore.model.known_plugins import KNOWN_PLUGINS

if TYPE_CHECKING:
    from lmcore.conversion.convert import Conversion
    from lmcore.model.checkpoint_format import CheckpointFormat

__all__ = ["ConvertSection", "run"]

_FILE_SIZE_GB = 5.0

_EPILOG = """\
At most two tensors at a time are in memory, and for the comparison of logits one model. TARGET is a
new directory, which appears when it is complete.

  lmcore checkpoint convert runs/my-run my-model --to huggingface --dtype bfloat16
  lmcore checkpoint convert --load-dir megatron --save-dir divided --target-tensor-parallel-size 2
  lmcore checkpoint convert downloads/Llama-3.2-1B runs/llama --to lmcore
  lmcore checkpoint convert runs/my-run for-megatron --to megatron --tensor-model-parallel-size 2"""

logger = logging.getLogger(__name__)


def _format_names() -> list[str]:
    """Return the names of the formats, with the package of each that is a plugin's.

    They do not depend on the plugins that are here: these are found after the help is made.
    """
    known = [f"{name} (of `{one.package}`)" for one in KNOWN_PLUGINS for name in one.formats]
    return [*OWN_FORMATS, *known]


@dataclass(frozen=True)
class ConvertSection(TokenizerSection):
    """Write a checkpoint in another format."""

    source: str = option(
        REQUIRED,
        "Checkpoint to read: a run directory, its `checkpoints`, one `iter_XXXXXXX`, or the "
        "directory of another program.",
        metavar="SOURCE",
    )
    target: str = option(REQUIRED, "New directory to write.", metavar="TARGET")
    to: str = option(
        REQUIRED,
        f"Format to write: {', '.join(_format_names())}, or one of another plugin.",
        metavar="FORMAT",
    )
    source_format: str | None = option(
        None,
        "Format of SOURCE, one of the same; default: recognized by its files.",
        metavar="FORMAT",
    )
    ckpt_step: str | None = option(
        None,
        "Step of the checkpoint in SOURCE instead of the newest; `best` too for a run of lmcore.",
        metavar="STEP",
    )
    weights_only: bool = option(
        False,
        "Leave the optimizer's state out; where the model has weights of its own, in its dtype, "
        "these are taken.",
    )
    dtype: str = option(
        "float32",
        "Dtype of the weights in other formats; lmcore's own are float32.",
        choices=("float32", "bfloat16", "float16"),
    )
    max_file_size_gb: float = option(
        _FILE_SIZE_GB,
        "Largest size of a weight file, in units of 10^9 bytes; a larger tensor has a file of its "
        "own.",
        above=0,
    )
    tensor_model_parallel_size: int = option(
        1, "Ranks of tensor parallelism, for Megatron's files.", minimum=1
    )
    pipeline_model_parallel_size: int = option(
        1, "Stages of the pipeline, for Megatron's files.", minimum=1
    )
    num_virtual_stages_per_pipeline_rank: int = option(
        1, "Parts of the model on each stage of an interleaved pipeline, likewise.", minimum=1
    )
    megatron_names: str | None = option(
        None,
        "Names in Megatron's files: `core` for its default layers, `core-local` for "
        "`--transformer-impl local`, `legacy` for the models before megatron-core; in files of "
        "forks, `pipeline`, or `legacy` for `--no-pipeline-parallel`. Default: the first.",
        choices=("core", "core-local", "legacy", "pipeline"),
    )
    verify: bool = option(
        True,
        "Compare the logits of 32 tokens by the model that was read and by the written one, on the "
        "CPU in float32, if the available memory has room for two such models; if they differ, "
        "nothing is written.",
    )
    tokenizer_type: str | None = option(
        None, "Type of the tokenizer; default: the checkpoint's own.", metavar="TYPE"
    )
    vocab_size: int | None = option(None, "Vocabulary size of a NullTokenizer.", minimum=1)
    json: bool = option(False, "Print the summary as JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()


def run(argv: list[str]) -> int:
    """Run `lmcore checkpoint convert` and return the exit status."""
    own = {flag for one in options_of(ConvertSection) for flag in one.flags}
    if not wants_help(argv):
        argv = tool_arguments(argv)
    section = parse_section(
        ConvertSection,
        argv,
        command="lmcore checkpoint convert",
        positionals=("source", "target"),
        foreign=convert_flags(own),
        epilog=_EPILOG,
    )
    if section.to == "lmcore" and section.dtype != "float32":
        raise ConfigError(
            f"`--dtype {section.dtype}` has no effect with `--to lmcore`",
            why="lmcore keeps weights in float32 and rounds them where `--precision` says so",
            hint="leave `--dtype` out",
        )
    plugins = find_plugins(argv, probe=False)
    if section.source_format is not None:
        named_format("--source-format", section.source_format)
    _refuse_without_effect(section, named_format("--to", section.to))
    from lmcore.checkpoint.dcp_metadata import dtype_of
    from lmcore.conversion.convert import convert
    from lmcore.conversion.megatron.parameters.layout import Layout
    from lmcore.data.tokenizer.build import registered_types

    with clean_termination():
        done = convert(
            _source(section),
            Path(section.target),
            section.to,
            source_format=section.source_format,
            weights_only=section.weights_only,
            options=WriteOptions(
                dtype=dtype_of(section.dtype),
                largest_file=max(1, int(section.max_file_size_gb * 1e9)),
                layout=Layout(
                    section.tensor_model_parallel_size,
                    section.pipeline_model_parallel_size,
                    section.num_virtual_stages_per_pipeline_rank,
                ),
                style=section.megatron_names,
            ),
            choice=TokenizerSettings.of(section),
            extra=registered_types(plugins),
            verify=section.verify,
        )
    print(json.dumps(done.to_json(), indent=2) if section.json else printable(_summary(done)))
    return 0


def _source(section: ConvertSection) -> Path:
    """Return the directory to read: SOURCE, or the checkpoint of `--ckpt-step` in it.

    Raises:
        CheckpointError, ConfigError: It has no checkpoint of that step.
    """
    from lmcore.checkpoint import chosen_checkpoint
    from lmcore.conversion.checkpoint_step import foreign_checkpoint
    from lmcore.model.checkpoint_format import format_of

    source, step = Path(section.source), section.ckpt_step
    if step is None:
        return source
    if (chosen := foreign_checkpoint(source, step, section.source_format)) is not None:
        return chosen
    # A source without any checkpoint is explained when it is read.
    return chosen_checkpoint(source, step) if format_of(source) == "lmcore" else source


def _refuse_without_effect(section: ConvertSection, to: CheckpointFormat) -> None:
    """Raise a `ConfigError` for a format that is only read, or an option that it does not have."""
    if not to.write:
        raise ConfigError(
            f"`--to {to.name}`: lmcore reads {to.title}, and does not write it",
            hint="choose one that it writes: "
            + ", ".join(f"`{one.name}`" for one in formats().values() if one.write),
        )
    for flag, is_given, has_it in (
        (
            "--max-file-size-gb",
            section.max_file_size_gb != _FILE_SIZE_GB,
            lambda one: "largest_file" in one.options,
        ),
        ("--tensor-model-parallel-size", section.tensor_model_parallel_size > 1, _is_divided),
        ("--pipeline-model-parallel-size", section.pipeline_model_parallel_size > 1, _is_divided),
        (
            "--num-virtual-stages-per-pipeline-rank",
            section.num_virtual_stages_per_pipeline_rank > 1,
            _is_divided,
        ),
        ("--megatron-names", section.megatron_names is not None, lambda one: bool(one.styles)),
    ):
        if is_given and not has_it(to):
            listed = " or ".join(f"`--to {one.name}`" for one in formats().values() if has_it(one))
            raise ConfigError(
                f"`{flag}` has no effect with `--to {to.name}`",
                why=f"it is for {listed}",
                hint=f"leave `{flag}` out",
            )


def _is_divided(to: CheckpointFormat) -> bool:
    """Return True if the format is written for a parallel layout."""
    return "layout" in to.options


def _position(done: Conversion) -> list[str]:
    """Return the line with the step and the consumed samples, as far as they are recorded."""
    parts = [] if done.step is None else [f"step {done.step:,}"]
    if done.consumed_samples is not None:
        parts.append(f"{counted(done.consumed_samples, 'sample')} consumed")
    return [f"  {', '.join(parts)}"] if parts else []


def _comparison(done: Conversion) -> list[str]:
    """Return the line about the logits of both models; none with `--no-verify`."""
    if done.not_compared is not None:
        return [f"  logits not compared: {done.not_compared}"]
    return [] if done.agreement is None else [f"  logits agree to {done.agreement}"]


def _summary(done: Conversion) -> str:
    state = "weights and optimizer state" if done.optimizer else "weights"
    speed = size_text(done.size / max(done.seconds, 1e-9))
    lines = [
        f"{done.directory}",
        f"  {done.source} -> {done.target}: {done.num_parameters:,} parameters, {state}",
        *_position(done),
        f"  {size_text(done.size)} in {done.seconds:.1f} s ({speed}/s)",
        *_comparison(done),
        *(f"  note: {note}" for note in done.notes),
    ]
    if done.target == "lmcore":
        lines += ["", *_next_commands(done)]
    return "\n".join(lines)


def _next_commands(done: Conversion) -> list[str]:
    """Return the commands that use a run that was written; without a tokenizer, with its flags."""
    directory = shlex.quote(str(done.directory))
    has_tokenizer = (done.directory / "tokenizer").is_dir()
    flags = example_flags(done.tokenizer_type, sentinels=done.answers_prompts)
    tokenizer = "" if has_tokenizer else f" {flags}"
    text = "--fill-mask --prompt 'TEXT [MASK] TEXT'" if done.fills_masks else "--prompt TEXT"
    lines = [f"next: lmcore generate --load {directory}{tokenizer} {text}"]
    if not (done.fills_masks or done.generates):
        lines = [f"next: lmcore train --load {directory}{tokenizer} --data-path PREFIX"]
    if done.step is None:
        return lines
    longer = [] if done.longer_flag is None else [f"{done.longer_flag} N"]
    flags = " ".join([*done.continue_flags, *longer, "--data-path PREFIX"])
    lines.append(f"      lmcore train --continue {directory}{tokenizer} {flags}")
    if not has_tokenizer:
        lines.append(
            "      (data of `lmcore data prepare` records its tokenizer: with it `lmcore train` "
            "needs no tokenizer options)"
        )
    return lines
