"""Groups of commands of the core, `lmcore GROUP COMMAND`: their help, and the chosen command."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from lmcore.cli.commands import known_inner
from lmcore.config.options.help import fitted
from lmcore.model.command import Command

__all__ = ["load_own", "run_group"]


def load_own(command: Command) -> Callable[[list[str]], int]:
    """Return the function of a command of the core."""
    module, _, name = command.load.partition(":")
    function: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
    return function


def run_group(group: str, argv: list[str]) -> int:
    """Run `lmcore GROUP ...` and return the exit status.

    Args:
        group: A group of the core.
        argv: Words after the group.

    Raises:
        ConfigError: Neither the core nor a plugin has the command.
    """
    own = known_inner(group).get("".join(argv[:1]))
    if own is not None and own.load:
        return load_own(own)(argv[1:])
    # Here: the core's own commands need no plugins' additions.
    from lmcore.cli.plugin_commands import (
        commands_for_help,
        commands_of,
        group_help,
        run_command,
    )

    if not argv or argv[0] in {"-h", "--help"}:
        print(fitted(group_help(group, commands_of(group, commands_for_help()))))
        return 0
    return run_command(group, argv)
