"""`KnownPlugin`: what a package brings that is no part of lmcore, for errors where it is absent.

The core names such a package here alone, and a package with commands in `lmcore.cli.commands`.  The
records of what it brings are in the package, which adds them by its hooks.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.errors import CheckpointArgumentError, MissingPackageError
from lmcore.model.installation import installation

__all__ = ["APPLICATIONS", "KNOWN_PLUGINS", "KnownPlugin"]

APPLICATIONS = ("data", "serve")
"""Extras of lmcore that install packages with commands; the records of these have both names."""


@dataclass(frozen=True)
class KnownPlugin:
    """Package with a plugin of lmcore, by the names and files that users meet without it.

    Attributes:
        package: Name of the distribution; the name of its module has underscores in it.
        title: Name of the other program in messages.
        extra: Extra of lmcore that installs the package with all that it needs.
        engine: Value of `--engine` that it brings.
        flags: Options of the core that only its engine has.
        formats: Values of `--to` and `--source-format` that it brings.
        files: Patterns of the files in a checkpoint of these formats.
    """

    package: str
    title: str
    extra: str
    engine: str
    flags: tuple[str, ...]
    formats: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def is_installed(self) -> bool:
        """True if the package is there, be its plugin usable or not."""
        return importlib.util.find_spec(self.package.replace("-", "_")) is not None

    def missing(self, needed_for: str, *, all_of_it: bool) -> MissingPackageError:
        """Return the error for a use of what the package brings.

        Args:
            needed_for: The use, an option with its value.
            all_of_it: True if what the package needs in turn is needed too.
        """
        error = MissingPackageError(self.package, needed_for=needed_for, install="")
        error.hint = installation(self.package, self.extra if all_of_it else "")
        return error

    def unread(self, directory: Path) -> CheckpointArgumentError | None:
        """Return the error for a checkpoint that the plugin would read; None if there is none.

        Args:
            directory: Directory in which no format was recognized.
        """
        if not self.has_files(directory):
            return None
        why = f"it has files of {self.title}, which the package `{self.package}` reads; "
        if self.is_installed:
            why += "its plugin adds no format here"
            hint = "see `lmcore plugins`"
        else:
            why += "it is not installed"
            hint = installation(self.package)
        return CheckpointArgumentError(f"`{directory}` cannot be read", why=why, hint=hint)

    def has_files(self, directory: Path) -> bool:
        """Return True if a directory, or one directly in it, has files of a checkpoint."""
        names = (name for file in self.files for name in (file, f"*/{file}"))
        return any(path.is_file() for name in names for path in directory.glob(name))


KNOWN_PLUGINS = (
    KnownPlugin(
        package="lmcore-deepspeed",
        title="DeepSpeed",
        extra="deepspeed",
        engine="deepspeed",
        flags=("--cpu-offload",),
        formats=("megatron-deepspeed",),
        files=("*mp_rank_*_model_states.pt", "layer_*-model_states.pt"),
    ),
)
