"""Commands that plugins add: found without probing a device, run like the core's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from lmcore.accelerator.registry import PluginCommand
from lmcore.errors import ConfigError, suggestion
from lmcore.plugin.discovery import discover
from lmcore.plugin.registrations import Registrations, load_command, plugin_commands

__all__ = ["commands_of_group", "find_commands", "group_help", "help_groups", "run_command"]

RESERVED = ("help", "lmcore", "version")
"""Words that are no commands of the core and must not become any plugin's."""


def find_commands(core: Sequence[str]) -> Registrations[PluginCommand]:
    """Return the commands that the installed plugins add to the core's."""
    return plugin_commands(discover(probe=False), dict.fromkeys([*core, *RESERVED], "lmcore"))


def commands_of_group(
    commands: Registrations[PluginCommand], group: str
) -> Mapping[str, PluginCommand]:
    """Return the commands `GROUP NAME` by their second word."""
    start = f"{group} "
    return {name.removeprefix(start): commands[name] for name in commands if name.startswith(start)}


def help_groups(core: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """Return summaries by command, by a title for each plugin, without the core's groups."""
    commands = find_commands(core)
    shown = [name for name in commands if name.partition(" ")[0] not in core]
    return {
        f"plugin {plugin}": {name: commands[name].summary for name in names}
        for plugin, names in groupby(shown, key=lambda name: commands.plugins[name].name)
    }


def group_help(group: str, commands: Mapping[str, PluginCommand]) -> str:
    """Return the help of `lmcore GROUP`.

    Args:
        group: First word of the commands.
        commands: The group's commands by their second word.
    """
    lines = [f"usage: lmcore {group} COMMAND [arguments]"]
    if commands:
        lines += ["", "commands:"]
        lines += [f"  {name:<11} {one.summary}" for name, one in commands.items()]
        lines += ["", f"`lmcore {group} COMMAND --help` explains a command."]
    return "\n".join(lines)


def run_command(name: str, arguments: list[str], core: Sequence[str]) -> int:
    """Run a command that plugins add and return its exit status.

    Args:
        name: First word of the command line.
        arguments: The other words; the first one may belong to the command's name.
        core: Names of the core's commands.

    Raises:
        ConfigError: No plugin adds it.
        PluginError: It cannot be loaded.
    """
    commands = find_commands(core)
    full = " ".join([name, *arguments[:1]])
    if full in commands:
        return load_command(commands[full], commands.plugins[full])(arguments[1:])
    if name in commands:
        return load_command(commands[name], commands.plugins[name])(arguments)
    group = commands_of_group(commands, name)
    if group and (not arguments or arguments[0] in {"-h", "--help"}):
        print(group_help(name, group))
        return 0
    what, hint = f"unknown command `{name}`", suggestion(name, [*core, *commands])
    if group:
        what, hint = f"unknown command `lmcore {full}`", suggestion(arguments[0], group)
    raise ConfigError(what, why=commands.why_missing(), hint=hint)
