"""`lmcore plugin ...`: commands for authors of plugins, which `lmcore-conformance` adds.

The kit implements `plugin check` and `plugin new` in its folders `plugin_check/` and `new_plugin/`,
in `plugins/conformance/src/lmcore_conformance/`.
"""

from __future__ import annotations

from lmcore.cli.commands import known_commands
from lmcore.cli.plugin.plugin_commands import (
    commands_of_group,
    find_commands,
    group_help,
    run_command,
)
from lmcore.config.options.help import fitted
from lmcore.errors import ConfigError
from lmcore.plugin.discovery import discover

__all__ = ["run"]

_SUMMARY = known_commands()["plugin"].summary

_KIT = "lmcore-conformance"
_INSTALL = "run `pip install ./plugins/conformance` in the folder that lmcore was installed from"


def run(argv: list[str]) -> int:
    """Run `lmcore plugin ...` and return the exit status.

    Raises:
        ConfigError: No installed plugin adds the command.
    """
    commands = commands_of_group(find_commands(()), "plugin")
    if not argv or argv[0] in {"-h", "--help"}:
        about = [] if commands else [f"`{_KIT}` is not installed: {_INSTALL}."]
        print(fitted("\n\n".join([_SUMMARY, group_help("plugin", commands), *about])))
        return 0
    if not commands:
        raise _no_commands(argv[0])
    return run_command("plugin", argv, ())


def _no_commands(name: str) -> ConfigError:
    """Return the error for a command of the kit, which is missing or cannot be used."""
    what = f"`lmcore plugin {name}` is not available"
    for one in discover(probe=False):
        if one.distribution == _KIT:
            why = f"plugin {one.label}, which adds it, {one.trouble}"
            return ConfigError(what, why=why, hint="`lmcore plugins` shows every plugin")
    return ConfigError(
        what,
        why=f"the package `{_KIT}`, which adds it, is not installed",
        hint=_INSTALL,
    )
