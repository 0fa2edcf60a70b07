"""Rule for files that are given as directories, and directories that are given as files."""

from __future__ import annotations

from pathlib import Path

from lmcore.base.errors import ConfigError
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig

__all__ = ["PATH_RULES"]


def _kinds(loaded: LoadedConfig) -> Problems:
    """Require that the `DIR` of an option is no file, and that its `FILE` is no directory."""
    for option in loaded.options.values():
        value = loaded.value(option.name)
        if not option.paths or option.repeated or value is None:
            continue
        path, found = Path(value), None
        if option.metavar == "FILE" and path.is_dir():
            found = "this is a directory, not a file"
        elif option.metavar == "DIR" and path.exists() and not path.is_dir():
            found = "this is a file, not a directory"
        if found is not None:
            hint = f"`{option.flag} {option.metavar}`: {option.help}"
            yield ConfigError(f"{loaded.shown(option.name)}: {found}", hint=hint)


PATH_RULES: tuple[Rule, ...] = (_kinds,)
