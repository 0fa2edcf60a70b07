"""The kit's own hooks: it adds the commands `lmcore plugin new` and `lmcore plugin check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcore.contract.registry import CommandRegistry


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Return name and versions."""
    return PluginInfo(
        "conformance", api=">=1.3,<2", torch=">=2.8", summary="the kit for authors of plugins"
    )


@hookimpl
def lmcore_add_commands(registry: CommandRegistry) -> None:
    """Add the commands for authors of plugins."""
    registry.add(
        "plugin new",
        "lmcore_conformance.new_plugin.command:run",
        "Write a new plugin: a distribution with tests, to be filled in.",
    )
    registry.add(
        "plugin check",
        "lmcore_conformance.plugin_check.command:run",
        "Check a plugin: call its hooks, and name each fault with its cause.",
    )
