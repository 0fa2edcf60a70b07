"""Find the plugins, choose the device, and prepare the environment for it.

The order in every command that needs a device: `find_plugins` (they bring options, so they come
before the configuration), the configuration, `choose_device`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcore.config.option import options_of
from lmcore.config.options.command_line import parse_flags
from lmcore.config.section import AcceleratorSection
from lmcore.errors import DeviceError
from lmcore.plugin import HANDED_DOWN, Selection, discover, launch_env, select, verify

if TYPE_CHECKING:
    from lmcore.plugin import PluginSet
    from lmcore.runtime.launch.rank import RankInfo

__all__ = ["choose_device", "find_plugins", "prepare_environment", "select_device"]

logger = logging.getLogger(__name__)


def find_plugins(argv: Sequence[str], *, probe: bool = True) -> PluginSet:
    """Return the installed plugins, without those that `--plugin-off` of *argv* names.

    The rest of *argv* is read later: what it may hold depends on the plugins.

    Args:
        argv: The arguments after the command's name.
        probe: Whether to ask for devices.

    Raises:
        ConfigError: A plugin that is not installed is to be left out.
    """
    own = {one.name: one for one in options_of(AcceleratorSection) if one.name == "plugin_off"}
    return discover(off=parse_flags(argv, own).values.get("plugin_off", ()), probe=probe)


def choose_device(plugins: PluginSet, requested: str | None, rank: RankInfo) -> Selection:
    """Return the choice; the environment is ready for torch's import then.

    Args:
        plugins: What `find_plugins` found.
        requested: What `--device` says.
        rank: This process's place.

    Raises:
        DeviceError: See `select_device`.
    """
    selection = select_device(plugins, requested, rank)
    prepare_environment(plugins, selection, rank)
    return selection


def select_device(plugins: PluginSet, requested: str | None, rank: RankInfo) -> Selection:
    """Return the choice; nothing is changed for it yet.

    In a worker whose launcher has chosen, that choice is verified and kept.

    Args:
        plugins: What `find_plugins` found.
        requested: What `--device` says.
        rank: This process's place.

    Raises:
        DeviceError: No device, not the one asked for, or another one than the launcher's.
    """
    handed_down = os.environ.get(HANDED_DOWN)
    if handed_down:
        selection = Selection.from_json(handed_down)
        _same_wish(selection, requested)
        if rank.world_size == 1:  # several verify it together, when they have found each other
            verify(selection, plugins)
    else:
        selection = select(plugins, requested=requested)
        for warning in selection.warnings:
            logger.warning("%s", warning)
        if selection.notice:
            logger.info("%s", selection.notice)
    return selection


def prepare_environment(plugins: PluginSet, selection: Selection, rank: RankInfo) -> None:
    """Set what the plugins want set for this process, before torch is imported.

    Raises:
        PluginError: They contradict each other.
    """
    _tell_of_crashes()
    os.environ.update(launch_env(plugins, selection, rank.to_dict(), os.environ))


def _tell_of_crashes() -> None:
    """Have a crash in native code, from here on, leave Python's stack on standard error."""
    with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError):
        faulthandler.enable()  # not where standard error is no file


def _same_wish(selection: Selection, requested: str | None) -> None:
    if requested not in {None, selection.plugin, selection.probe.device_type}:
        raise DeviceError(
            f"`--device {requested}`: the launcher of this process chose `{selection.plugin}`",
            why=f"`{HANDED_DOWN}` is set: {selection.reason}",
            hint=f"give `--device` to the launcher, or unset `{HANDED_DOWN}`",
        )
