"""Commands that plugins add: found without probing a device, listed and run like the core's own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby

from lmcore.base.errors import ConfigError, LmcoreError, suggestion
from lmcore.cli.commands import COMMANDS, GROUPS, known_commands, known_inner, own_names
from lmcore.model.command import Command
from lmcore.model.installation import installation
from lmcore.plugin.discovery import discover
from lmcore.plugin.record import PluginSet
from lmcore.plugin.registrations import Registrations, load_command, plugin_commands

__all__ = [
    "commands_for_help",
    "commands_of",
    "find_commands",
    "group_help",
    "help_groups",
    "help_rows",
    "run_command",
]

RESERVED = ("help", "lmcore", "version")
"""Words that are no commands of the core and must not become any plugin's."""

_NAMES = 11
"""Columns of the names in a list of commands; the summary of a longer one is below it."""


def find_commands(plugins: PluginSet | None = None) -> Registrations[Command]:
    """Return the commands that plugins add to the core's.

    Args:
        plugins: Result of `discover`; None: the installed ones.
    """
    found = discover(probe=False) if plugins is None else plugins
    return plugin_commands(found, dict.fromkeys([*own_names(), *RESERVED], "lmcore"), GROUPS)


def commands_for_help() -> Registrations[Command]:
    """Return the commands of plugins; none, and a message, if `LMCORE_PLUGINS` is wrong."""
    try:
        return find_commands()
    except LmcoreError as error:
        sys.stderr.write(f"plugins' commands are not listed: {error}\n\n")
        return Registrations()


def help_groups(found: Registrations[Command]) -> Mapping[str, Iterable[str]]:
    """Return the rows of `lmcore --help` by their titles: the core's, and one for each plugin.

    Args:
        found: Commands of the plugins.
    """
    known = known_commands()
    rows = {title: help_rows(_present(ours, found)) for title, ours in COMMANDS.items()}
    shown = [name for name in found if name.partition(" ")[0] not in known]
    for plugin, names in groupby(shown, key=lambda name: found.plugins[name].name):
        rows[f"plugin {plugin}"] = help_rows({name: found[name].summary for name in names})
    return rows


def _present(own: Iterable[Command], found: Mapping[str, Command]) -> dict[str, str]:
    """Return summaries by name; the one of a command that no plugin adds says what to install."""
    rows = {}
    for one in own:
        there = one if one.load else found.get(one.name)
        rows[one.name] = there.summary if there else f"{one.summary} (needs {one.requirement})"
    return rows


def help_rows(summaries: Mapping[str, str]) -> list[str]:
    """Return the lines of a list of commands."""
    return [
        row
        for name, summary in summaries.items()
        for row in (
            [f"  {name:<{_NAMES}} {summary}"]
            if len(name) <= _NAMES
            else [f"  {name}", f"  {'':<{_NAMES}} {summary}"]
        )
    ]


def commands_of(group: str, found: Mapping[str, Command]) -> dict[str, str]:
    """Return the summaries of the commands `GROUP NAME` by their second word.

    Args:
        group: First word of the commands.
        found: Commands of the plugins.
    """
    own = known_inner(group)
    rows = dict(zip(own, _present(own.values(), found).values(), strict=True))
    return rows | {
        inner: one.summary
        for name, one in found.items()
        for first, _, inner in [name.partition(" ")]
        if first == group and inner
    }


def group_help(group: str, summaries: Mapping[str, str]) -> str:
    """Return the help of `lmcore GROUP`.

    Args:
        group: First word of the commands.
        summaries: Summaries of the group's commands by their second word.
    """
    known = known_commands()
    lines = [known[group].summary, ""] if group in known else []
    lines += [f"usage: lmcore {group} COMMAND [arguments]", "", "commands:"]
    lines += [*help_rows(summaries), "", f"`lmcore {group} COMMAND --help` explains a command."]
    return "\n".join(lines)


def run_command(name: str, arguments: list[str]) -> int:
    """Run a command that plugins add and return its exit status.

    Args:
        name: First word of the command line.
        arguments: The other words; the first one may belong to the command's name.

    Raises:
        ConfigError: No plugin adds it.
        PluginError: It cannot be loaded.
    """
    plugins = discover(probe=False)
    found = find_commands(plugins)
    full = " ".join([name, *arguments[:1]])
    if full in found:
        return load_command(found[full], found.plugins[full])(arguments[1:])
    if name in found:
        return load_command(found[name], found.plugins[name])(arguments)
    inner = commands_of(name, found)
    if inner and (not arguments or arguments[0] in {"-h", "--help"}):
        print(group_help(name, inner))
        return 0
    for one in (known_commands().get(name), known_inner(name).get("".join(arguments[:1]))):
        if one is not None and one.package:
            raise _unavailable(one, plugins, found)
    what, hint = f"unknown command `{name}`", suggestion(name, [*known_commands(), *found])
    if inner:
        what, hint = f"unknown command `lmcore {full}`", suggestion(arguments[0], inner)
    raise ConfigError(what, why=found.why_missing(), hint=hint)


def _unavailable(one: Command, plugins: PluginSet, found: Registrations[Command]) -> ConfigError:
    """Return the error for a command of a package that is missing or cannot be used."""
    what = f"`lmcore {one.name}` is not available"
    for record in plugins:
        if record.distribution == one.package:
            reason = found.failures.get(record.name, record.trouble)
            why = f"plugin {record.label}, which adds it, {reason}"
            return ConfigError(what, why=why, hint="`lmcore plugins` shows every plugin")
    return ConfigError(
        what,
        why=f"the package `{one.package}`, which adds it, is not installed",
        hint=installation(one.package, one.extra),
    )
