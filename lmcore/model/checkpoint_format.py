"""`CheckpointFormat`: the record of a format of checkpoints, and the registry of formats.

Torch-free: what needs torch is named as `module:object` and loaded when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import (
    CheckpointError,
    ConfigError,
    PluginError,
    suggestion,
)

__all__ = ["CheckpointFormat", "format_of", "formats", "named_format"]

_OWN = (
    "lmcore.conversion.native:FORMAT",
    "lmcore.conversion.huggingface:FORMAT",
    "lmcore.conversion.megatron.rank_files:FORMAT",
    "lmcore.conversion.megatron.torch_dist:FORMAT",
    "lmcore.conversion.deepspeed:FORMAT",
)
"""The core's formats, in the order in which a directory is compared with them."""
_formats: dict[str, CheckpointFormat] = {}


@dataclass(frozen=True)
class CheckpointFormat:
    """Format of the checkpoints of a program.

    Attributes:
        name: Value of `--to` and `--source-format`.
        title: Name in messages: "Hugging Face".
        described: Content of a directory, in messages: "a model of Hugging Face".
        matches: Returns True if a directory has such a checkpoint; torch-free, and quick.
        read: Function `module:object` that returns the `ModelState` in a directory.  It is called
            with the directory, `weights_only` (True to leave the optimizer's state out; its files
            need not be opened then) and `compare` (False to open a checkpoint for its description
            only, without checksums).
        write: Function `module:object` that writes a `ModelState`, with its tokenizer or None, into
            an empty directory, and returns notes for the user.  It is called with these three, the
            `dtype` of the weights, and the fields of `WriteOptions` in `options`; empty: the format
            is only read.
        options: Fields of `WriteOptions` that it has, beside `dtype`.
        styles: Sets of parameter names that can be written, the default first; empty: one.
        optimizer: True if the optimizer's state is written, too.
        checkpoints: Returns the checkpoints of single steps in a directory, or the directory alone
            if it is one itself; None: a model of the format has no steps.
        lacks: Returns the error for a directory with a part of a checkpoint; None if it has none.
            A `CheckpointArgumentError` is for another directory, others are for a damaged one.
        files: Names of the files that `matches` looks for, for the message about a directory
            without a checkpoint; empty: the message has the title alone.
    """

    name: str
    title: str
    described: str
    matches: Callable[[Path], bool]
    read: str
    write: str = ""
    options: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()
    optimizer: bool = False
    checkpoints: Callable[[Path], Sequence[Path]] | None = None
    lacks: Callable[[Path], CheckpointError | None] = lambda _: None
    files: str = ""

    def load(self, target: str) -> Any:
        """Return the function `read` or `write`.

        Raises:
            PluginError: It cannot be loaded.
        """
        module, _, name = target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as cause:
            raise PluginError(
                f"the checkpoint format `{self.name}` cannot be loaded",
                why=f"`{target}`: {cause}",
                hint="install the package that brings the format, in a version that fits",
            ) from cause


def formats() -> dict[str, CheckpointFormat]:
    """Return the registry: every format by its name, in the order of recognition."""
    if not _formats:
        for target in _OWN:
            module, _, name = target.partition(":")
            found: CheckpointFormat = getattr(importlib.import_module(module), name)
            _formats[found.name] = found
    return _formats


def named_format(flag: str, name: str) -> CheckpointFormat:
    """Return the format that an option names.

    Args:
        flag: Flag of the option, for the message.
        name: Its value.

    Raises:
        ConfigError: There is no such format.
    """
    if name not in formats():
        hint = suggestion(name, formats())
        raise ConfigError(
            f"`{flag} {name}`: unknown format",
            hint=f"{hint}; a plugin that brings others must be installed, see `lmcore plugins`",
        )
    return formats()[name]


def format_of(directory: Path) -> str | None:
    """Return the name of the format of the checkpoint in *directory*; None if none matches."""
    return next((one.name for one in formats().values() if one.matches(directory)), None)
