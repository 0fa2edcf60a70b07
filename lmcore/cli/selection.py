"""Discovery of plugins by a command that needs a device.

Such a command calls `find_plugins` first, because plugins add options; then it reads its
configuration and calls `lmcore.runtime.device_choice.choose_device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcore.config.option import options_of
from lmcore.config.options.command_line import parse_flags
from lmcore.config.section import AcceleratorSection
from lmcore.plugin import discover

if TYPE_CHECKING:
    from lmcore.plugin import PluginSet

__all__ = ["find_plugins"]


def find_plugins(argv: Sequence[str], *, probe: bool = True) -> PluginSet:
    """Return the installed plugins that `--plugin-off` does not turn off.

    Other arguments are parsed later, because their options depend on the plugins.

    Args:
        argv: Arguments after the name of the command.
        probe: True to probe for devices.

    Raises:
        ConfigError: `--plugin-off` names a plugin that is not installed.
    """
    own = {one.name: one for one in options_of(AcceleratorSection) if one.name == "plugin_off"}
    return discover(off=parse_flags(argv, own).values.get("plugin_off", ()), probe=probe)
