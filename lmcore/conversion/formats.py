"""Formats of checkpoints: each is read as a `ModelState`, and written from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcore.checkpoint import survey
from lmcore.conversion.deepspeed.names import STYLES as DEEPSPEED_STYLES
from lmcore.conversion.deepspeed.read import read_deepspeed
from lmcore.conversion.deepspeed.write import write_deepspeed
from lmcore.conversion.detection.format import MATCHES, format_of, unrecognized
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.write import LARGEST_FILE, write_huggingface
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import STYLES, require_names
from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import ModelState
from lmcore.errors import CheckpointArgumentError
from lmcore.families.gpt.megatron import NAMES as GPT_NAMES
from lmcore.model.megatron_names import names_for

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["FORMATS", "CheckpointFormat", "WriteOptions", "read_state"]


@dataclass(frozen=True)
class WriteOptions:
    """Settings of a written checkpoint; a format ignores a setting that it does not have.

    Attributes:
        dtype: Dtype of the weights.
        largest_file: Largest size of a file in bytes.
        layout: Parallel layout of the run that will load the checkpoint.
        names: Set of parameter names, one of `STYLES` in `megatron.parameters.names` or in
            `deepspeed.names`; None: the format's first.
    """

    dtype: torch.dtype = torch.float32
    largest_file: int = LARGEST_FILE
    layout: Layout = field(default_factory=Layout)
    names: str | None = None


@dataclass(frozen=True)
class ReadOptions:
    """Settings for reading a checkpoint.

    Attributes:
        weights_only: True to leave the optimizer's state out; its files are not opened if the
            weights are in others.
        compare: True to compare the checksums of files that are read; False to open a checkpoint
            for its description, without its tensors.
    """

    weights_only: bool = False
    compare: bool = True


@dataclass(frozen=True)
class CheckpointFormat:
    """Format of checkpoints.

    Attributes:
        title: Name of the format in messages.
        read: Function that returns the state in a directory.
        write: Function that writes a state, with its tokenizer if there is one, into an empty
            directory and returns notes for the user.
        optimizer: True if the optimizer's state is written, too.
    """

    title: str
    read: Callable[[Path, ReadOptions], ModelState]
    write: Callable[[ModelState, Path, Tokenizer | None, WriteOptions], list[str]]
    optimizer: bool = False


def _write_huggingface(
    state: ModelState, directory: Path, tokenizer: Tokenizer | None, options: WriteOptions
) -> list[str]:
    return write_huggingface(
        state, directory, tokenizer, dtype=options.dtype, largest_file=options.largest_file
    )


def _write_megatron(
    state: ModelState, directory: Path, tokenizer: Tokenizer | None, options: WriteOptions
) -> list[str]:
    style = _style(options.names, STYLES, "megatron")
    require_names(state, "Megatron-LM", names_for(state.shape), style)
    return write_megatron(
        state, directory, tokenizer, layout=options.layout, style=style, dtype=options.dtype
    )


def _write_dist(
    state: ModelState, directory: Path, tokenizer: Tokenizer | None, options: WriteOptions
) -> list[str]:
    style = _style(options.names, STYLES, "megatron-dist")
    require_names(state, "Megatron-LM", names_for(state.shape))
    return write_distributed(
        state,
        directory,
        tokenizer,
        layout=options.layout,
        dtype=options.dtype,
        step_of_parameters=style != STYLES[0],
    )


def _write_deepspeed(
    state: ModelState, directory: Path, tokenizer: Tokenizer | None, options: WriteOptions
) -> list[str]:
    names = names_for(state.shape)
    require_names(state, "Megatron-DeepSpeed", names if names == GPT_NAMES else None)
    return write_deepspeed(
        state,
        directory,
        tokenizer,
        layout=options.layout,
        style=_style(options.names, DEEPSPEED_STYLES, "megatron-deepspeed"),
        dtype=options.dtype,
    )


def _style(name: str | None, styles: Sequence[str], to: str) -> str:
    """Return the set of names to write.

    Raises:
        CheckpointArgumentError: The format does not have it.
    """
    if name is None or name in styles:
        return name or styles[0]
    listed = " or ".join(f"`{one}`" for one in styles)
    raise CheckpointArgumentError(
        f"`--to {to}` does not have the names `{name}`",
        why=f"its names are {listed}",
        hint=f"give one of them, or leave `--megatron-names` out for `{styles[0]}`",
    )


FORMATS = {
    "lmcore": CheckpointFormat(
        "lmcore",
        lambda directory, options: LmcoreState(directory, weights_only=options.weights_only),
        lambda state, directory, tokenizer, _options: write_lmcore(state, directory, tokenizer),
        optimizer=True,
    ),
    "huggingface": CheckpointFormat(
        "Hugging Face",
        lambda directory, options: HuggingFaceState(directory, compare=options.compare),
        _write_huggingface,
    ),
    "megatron": CheckpointFormat(
        "Megatron-LM",
        lambda directory, options: MegatronState(directory, **vars(options)),
        _write_megatron,
        optimizer=True,
    ),
    "megatron-dist": CheckpointFormat(
        DistributedState.format,
        lambda directory, options: DistributedState(directory, **vars(options)),
        _write_dist,
        optimizer=True,
    ),
    "megatron-deepspeed": CheckpointFormat(
        "Megatron-DeepSpeed",
        lambda directory, options: read_deepspeed(directory, **vars(options)),
        _write_deepspeed,
        optimizer=True,
    ),
}
"""Every format by the name that `lmcore checkpoint convert` takes, as in `detection.format`."""


def read_state(
    directory: Path, name: str | None = None, *, weights_only: bool = False, compare: bool = True
) -> ModelState:
    """Return the state of a checkpoint.

    Args:
        directory: Directory of the checkpoint.
        name: Name of its format; None: recognized by its files.
        weights_only: See `ReadOptions`.
        compare: See `ReadOptions`.

    Raises:
        CheckpointError: There is no checkpoint of a known format, or it is damaged.
    """
    known = _known_format(directory, name)
    state = FORMATS[known].read(directory, ReadOptions(weights_only, compare))
    if weights_only:
        state.leave_optimizer_out()
    return state


def _known_format(directory: Path, name: str | None) -> str:
    """Return the name of the format to read.

    Args:
        directory: Directory of the checkpoint.
        name: Name that the user gave; None: recognized by its files.

    Raises:
        CheckpointError: There is no checkpoint, or one of another format.
    """
    found = format_of(directory) if directory.is_dir() else None
    if name is not None and directory.is_dir():
        if found is None or MATCHES[name](directory):
            return name
        raise CheckpointArgumentError(
            f"`{directory}` has no checkpoint of the format `{name}`",
            why=f"its files are of the format `{found}`",
            hint="leave `--source-format` out, or give another directory",
        )
    if found is not None:
        return found
    if (problem := unrecognized(directory)) is not None:
        raise problem
    there = survey(directory)  # explains a path that does not exist, or is a file
    if there.unreadable:
        there.newest()  # explains the damage
    listed = ", ".join(one.title for one in FORMATS.values())
    raise CheckpointArgumentError(
        f"no checkpoint in `{directory}`",
        why=f"it has no files of any known format: {listed}",
        hint="give the directory that has the weights; for lmcore a run directory, its "
        "`checkpoints`, or one `iter_XXXXXXX`",
    )
