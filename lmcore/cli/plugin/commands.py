"""Commands that plugins add: found without probing a device, run like the core's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from lmcore.accelerator.registry import PluginCommand
from lmcore.errors import ConfigError, suggestion
from lmcore.plugin.discovery import discover
from lmcore.plugin.registrations import Registrations, load_command, plugin_commands

__all__ = ["find_commands", "help_groups", "run_command"]

RESERVED = ("help", "lmcore", "version")
"""Words that are no commands of the core and must not become any plugin's."""


def find_commands(core: Sequence[str]) -> Registrations[PluginCommand]:
    """Return the commands that the installed plugins add to those of the core."""
    return plugin_commands(discover(probe=False), dict.fromkeys([*core, *RESERVED], "lmcore"))


def help_groups(core: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """Return summaries by command, under a title for each plugin."""
    commands = find_commands(core)
    return {
        f"plugin {plugin}": {name: commands[name].summary for name in names}
        for plugin, names in groupby(commands, key=lambda name: commands.plugins[name].name)
    }


def run_command(name: str, arguments: list[str], core: Sequence[str]) -> int:
    """Run a command that is none of the core's and return its exit status.

    Raises:
        ConfigError: No plugin adds it.
        PluginError: It cannot be loaded.
    """
    commands = find_commands(core)
    if name not in commands:
        raise ConfigError(
            f"unknown command `{name}`",
            why=commands.why_missing(),
            hint=suggestion(name, [*core, *commands]),
        )
    return load_command(commands[name], commands.plugins[name])(arguments)
