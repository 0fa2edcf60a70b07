"""Choice of the device by a process, and the environment that it needs before torch is imported."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
from typing import TYPE_CHECKING

from lmcore.base.errors import DeviceError
from lmcore.base.log import info_once, warn_once
from lmcore.plugin import HANDED_DOWN, Selection, launch_env, select, verify

if TYPE_CHECKING:
    from lmcore.plugin import PluginSet
    from lmcore.runtime.launch.rank import RankInfo

__all__ = ["choose_device", "prepare_environment", "select_device"]

logger = logging.getLogger(__name__)


def choose_device(plugins: PluginSet, requested: str | None, rank: RankInfo) -> Selection:
    """Choose the device and prepare the environment, so that torch can be imported.

    Args:
        plugins: The plugins, from `find_plugins`.
        requested: Value of `--device`; None if it was not given.
        rank: Rank of this process.

    Raises:
        DeviceError: See `select_device`.
    """
    selection = select_device(plugins, requested, rank)
    prepare_environment(plugins, selection, rank)
    return selection


def select_device(plugins: PluginSet, requested: str | None, rank: RankInfo) -> Selection:
    """Choose the device; a worker verifies and keeps its launcher's choice.

    Args:
        plugins: The plugins, from `find_plugins`.
        requested: Value of `--device`; None if it was not given.
        rank: Rank of this process.

    Raises:
        DeviceError: There is no device, not the requested device, or another device than the
            launcher's.
    """
    handed_down = os.environ.get(HANDED_DOWN)
    if handed_down:
        selection = Selection.from_json(handed_down)
        _check_request(selection, requested)
        if rank.world_size == 1:  # several processes verify it together after their rendezvous
            verify(selection, plugins)
    else:
        selection = select(plugins, requested=requested)
        for warning in selection.warnings:
            warn_once(logger, "%s", warning)
        if selection.notice:
            info_once(logger, "%s", selection.notice)
    return selection


def prepare_environment(plugins: PluginSet, selection: Selection, rank: RankInfo) -> dict[str, str]:
    """Set the environment variables that plugins need before torch is imported, and return them.

    Raises:
        PluginError: Plugins contradict each other.
    """
    _enable_crash_stacks()
    variables = launch_env(plugins, selection, rank.to_dict(), os.environ)
    os.environ.update(variables)
    return variables


def _enable_crash_stacks() -> None:
    """Print Python's stack on standard error if native code crashes."""
    with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError):
        faulthandler.enable()  # fails if standard error is no file


def _check_request(selection: Selection, requested: str | None) -> None:
    if requested not in {None, selection.plugin, selection.probe.device_type}:
        raise DeviceError(
            f"`--device {requested}`: the launcher of this process chose `{selection.plugin}`",
            why=f"`{HANDED_DOWN}` is set: {selection.reason}",
            hint=f"give `--device` to the launcher, or unset `{HANDED_DOWN}`",
        )
