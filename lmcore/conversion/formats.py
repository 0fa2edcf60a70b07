"""Checkpoints of any format, read as a `ModelState` and written from one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import (
    CheckpointArgumentError,
    CheckpointError,
    LmcoreError,
    PluginError,
    counted,
)
from lmcore.conversion.state import WEIGHT
from lmcore.model.checkpoint_format import (
    CheckpointFormat,
    format_of,
    formats,
    of_absent_plugin,
    subdirectories,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.conversion.megatron.parameters.layout import Layout
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["WriteOptions", "incomplete", "read_state", "unrecognized", "write_state"]

_MAX_ENTRIES = 1000
_SHOWN = 5
_WANTED = (
    "give a run directory, its `checkpoints`, one `iter_XXXXXXX`, or the directory that has the "
    "weights of a model of another program"
)


def _float32() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True)
class WriteOptions:
    """Settings of a written checkpoint; a format ignores a setting that it does not have.

    Attributes:
        dtype: Dtype of the weights.
        largest_file: Largest size of a file in bytes; by default 5 GB, as in transformers.
        layout: Parallel layout of the run that will load the checkpoint; None: one process.
        style: Set of parameter names, one of the format's `styles`; None: the format's first.
    """

    dtype: torch.dtype = field(default_factory=_float32)
    largest_file: int = 5 * 10**9
    layout: Layout | None = None
    style: str | None = None


def unrecognized(directory: Path) -> CheckpointError | None:
    """Return the error that says what was looked for at a path, and what is there.

    None if a format is recognized, or if there are checkpoints of lmcore, whose damage
    `lmcore.checkpoint.find_checkpoint` explains.

    Args:
        directory: Path that a user named.
    """
    from lmcore.checkpoint import no_such_directory, survey

    if not directory.is_dir():
        return no_such_directory(directory, _WANTED)
    if format_of(directory) is not None:
        return None
    if (problem := incomplete(directory)) is not None:
        return problem
    try:
        there = survey(directory)
        if there.readable or there.unreadable:
            return None
    except CheckpointError:
        return None
    looked = [f"  {one.title}{': ' * bool(one.files)}{one.files}" for one in formats().values()]
    return CheckpointArgumentError(
        f"no checkpoint in `{directory}`",
        why="\n".join([f"{_content(directory)}; looked for the files of", *looked]),
        hint=_WANTED,
    )


def _content(directory: Path) -> str:
    """Return the first names in a directory, as words."""
    entries = list(itertools.islice(directory.iterdir(), _MAX_ENTRIES))
    if not entries:
        return "it is empty"
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in entries)
    more = f" and {counted(len(names) - _SHOWN, 'other')}" if len(names) > _SHOWN else ""
    return f"it has {', '.join(f'`{name:.80}`' for name in names[:_SHOWN])}{more}"


def incomplete(directory: Path) -> CheckpointError | None:
    """Return the error that says what *directory* lacks; None if it has no part of a checkpoint.

    Args:
        directory: Directory in which no format was recognized.
    """
    if (unread := of_absent_plugin(directory)) is not None:
        return unread
    problems = [problem for one in formats().values() if (problem := one.lacks(directory))]
    for problem in problems:
        if not isinstance(problem, CheckpointArgumentError):
            return problem  # of a damaged checkpoint
    snapshots = directory / "snapshots"
    for inside in (snapshots, directory):  # of the cache of huggingface_hub; of a trainer
        found = subdirectories(inside, format_of)
        if found:
            return CheckpointArgumentError(
                f"no checkpoint in `{directory}`",
                why=f"its {'snapshots' if inside == snapshots else 'subdirectories'} have some",
                hint=f"did you mean `{found[-1]}`?",
            )
    return problems[0] if problems else None


def read_state(
    directory: Path, name: str | None = None, *, weights_only: bool = False, compare: bool = True
) -> ModelState:
    """Return the state of a checkpoint.

    Args:
        directory: Directory of the checkpoint.
        name: Name of its format; None: recognized by its files.
        weights_only: True to leave the optimizer's state out; its files are not opened if the
            weights are in others.
        compare: True to compare the checksums of files that are read; False to open a checkpoint
            for its description, without its tensors.

    Raises:
        CheckpointError: There is no checkpoint of a known format, or it is damaged.
    """
    known = _known_format(directory, name)
    read = known.load(known.read)
    if known.read.startswith("lmcore."):
        state: ModelState = read(directory, weights_only=weights_only, compare=compare)
    else:
        with _naming(known, directory):
            state = read(directory, weights_only=weights_only, compare=compare)
        _check_tensors(state, known)
    if weights_only:
        state.leave_optimizer_out()
    return state


@contextmanager
def _naming(
    known: CheckpointFormat,
    directory: Path,
    done: str = "read",
    passed: tuple[type[Exception], ...] = (LmcoreError,),
) -> Iterator[None]:
    """Turn exceptions of a plugin's format, but *passed*, into an error that names the format."""
    try:
        yield
    except passed:
        raise
    except Exception as cause:
        raise PluginError(
            f"`{directory}` cannot be {done} as {known.described}",
            why=f"the format `{known.name}` of a plugin raised {type(cause).__name__}: {cause}",
            hint="the files may be damaged; else report this to the authors of the plugin",
        ) from cause


def _check_tensors(state: ModelState, known: CheckpointFormat) -> None:
    """Have each tensor of a plugin's state compared with its parameter when it is read."""
    plain = state.read

    def read(name: str, kind: str = WEIGHT) -> Tensor:
        with _naming(known, state.path):
            tensor = plain(name, kind)
            if tensor.shape != state.parameters[name] or not tensor.is_floating_point():
                raise CheckpointError(
                    f"`{state.path}` is damaged, or not of its model",
                    why=f"`{name}` is {tensor.dtype} {list(tensor.shape)}, and its parameter "
                    f"{list(state.parameters[name])}",
                )
        return tensor

    state.read = read  # type: ignore[method-assign]


def write_state(
    to: CheckpointFormat,
    state: ModelState,
    directory: Path,
    tokenizer: Tokenizer | None,
    options: WriteOptions,
) -> list[str]:
    """Write a checkpoint into an empty directory and return notes for the user.

    Args:
        to: Format to write.
        state: Model to write.
        directory: Empty directory.
        tokenizer: Tokenizer of the model; None: it is not known.
        options: Settings; the format ignores others than its own.

    Raises:
        CheckpointError: The format has no such model or names, or *state* is damaged.
        OSError: The file system refuses.
    """
    given = {name: getattr(options, name) for name in to.options}
    if to.styles:
        given["style"] = _style(to, options.style)
    given = {name: value for name, value in given.items() if value is not None}
    write = to.load(to.write)
    notes: list[str]
    if to.write.startswith("lmcore."):
        notes = write(state, directory, tokenizer, dtype=options.dtype, **given)
    else:
        with _naming(to, state.path, "written", passed=(LmcoreError, OSError)):
            notes = write(state, directory, tokenizer, dtype=options.dtype, **given)
    return notes


def _style(to: CheckpointFormat, style: str | None) -> str:
    if style is None or style in to.styles:
        return style or to.styles[0]
    listed = " or ".join(f"`{one}`" for one in to.styles)
    raise CheckpointArgumentError(
        f"`--to {to.name}` does not have the names `{style}`",
        why=f"its names are {listed}",
        hint=f"give one of them, or leave `--megatron-names` out for `{to.styles[0]}`",
    )


def _known_format(directory: Path, name: str | None) -> CheckpointFormat:
    """Return the format to read: the named one, or else the format of the files."""
    found = format_of(directory) if directory.is_dir() else None
    if name is not None and directory.is_dir():
        if found is None or formats()[name].matches(directory):
            return formats()[name]
        raise CheckpointArgumentError(
            f"`{directory}` has no checkpoint of the format `{name}`",
            why=f"its files are of the format `{found}`",
            hint="leave `--source-format` out, or give another directory",
        )
    if found is not None:
        return formats()[found]
    if (problem := unrecognized(directory)) is not None:
        raise problem
    from lmcore.checkpoint import survey

    survey(directory).newest()  # explains the damage
    return formats()["lmcore"]
