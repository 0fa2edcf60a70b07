"""`CheckpointFormat`: the record of a format of checkpoints, and the registry of formats.

Torch-free: what needs torch is named as `module:object` and loaded when it is used.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.base.errors import (
    CheckpointArgumentError,
    CheckpointError,
    ConfigError,
    PluginError,
    suggestion,
)
from lmcore.model.known_plugins import KNOWN_PLUGINS

__all__ = [
    "OWN_FORMATS",
    "CheckpointFormat",
    "format_of",
    "formats",
    "loaded_formats",
    "named_format",
    "of_absent_plugin",
    "subdirectories",
]

OWN_FORMATS = {
    "lmcore": "lmcore.conversion.native:FORMAT",
    "huggingface": "lmcore.conversion.huggingface:FORMAT",
    "megatron": "lmcore.conversion.megatron.rank_files:FORMAT",
    "megatron-dist": "lmcore.conversion.megatron.torch_dist:FORMAT",
}
"""The core's formats by name, in the order in which a directory is compared with them."""
_MAX_ENTRIES = 1000
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
        tokenizer_places: Returns the directories in which a run that begins with a checkpoint
            looks for files of a tokenizer, if the checkpoint itself has none.
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
    tokenizer_places: Callable[[Path], Sequence[Path]] = lambda _: ()

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
    if not _formats.keys() & OWN_FORMATS.keys():  # their records take time to load
        added = dict(_formats)
        _formats.clear()
        for name, target in OWN_FORMATS.items():
            module, _, record = target.partition(":")
            _formats[name] = getattr(importlib.import_module(module), record)
        _formats.update(added)
    return _formats


def loaded_formats() -> dict[str, CheckpointFormat]:
    """Return the registry as it is: without the core's formats if nobody asked for them yet."""
    return _formats


def named_format(flag: str, name: str) -> CheckpointFormat:
    """Return the format that an option names.

    Args:
        flag: Flag of the option, for the message.
        name: Its value.

    Raises:
        ConfigError: There is no such format.
        MissingPackageError: A package that is not installed brings it.
    """
    if name not in formats():
        for one in KNOWN_PLUGINS:
            if name in one.formats and not one.is_installed:
                raise one.missing(f"`{flag} {name}`", all_of_it=False)
        hint = suggestion(name, formats())
        raise ConfigError(
            f"`{flag} {name}`: unknown format",
            hint=f"{hint}; a plugin that brings others must be installed, see `lmcore plugins`",
        )
    return formats()[name]


def format_of(directory: Path) -> str | None:
    """Return the name of the format of the checkpoint in *directory*; None if none matches."""
    return next((one.name for one in formats().values() if one.matches(directory)), None)


def of_absent_plugin(directory: Path) -> CheckpointArgumentError | None:
    """Return the error for a checkpoint that a known plugin would read; None if there is none.

    Args:
        directory: Directory in which no format was recognized.
    """
    absent = (one for one in KNOWN_PLUGINS if not formats().keys() >= set(one.formats))
    return next((problem for one in absent if (problem := one.unread(directory))), None)


def subdirectories(directory: Path, wanted: Callable[[Path], object]) -> list[Path]:
    """Return the directories in *directory* that may have been meant, the oldest first.

    Args:
        directory: Directory that a user named; one that cannot be read has none.
        wanted: Returns a false value for a directory that cannot have been meant.
    """
    try:
        folders = (path for path in directory.iterdir() if path.is_dir())
        found = [path for path in itertools.islice(folders, _MAX_ENTRIES) if wanted(path)]
        return sorted(found, key=lambda path: path.stat().st_mtime)
    except OSError:
        return []
