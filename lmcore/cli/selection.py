"""Find the plugins, choose the device, and prepare the environment for it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from lmcore.plugins import discover, launch_env, select

if TYPE_CHECKING:
    from lmcore.plugins import PluginSet, Selection
    from lmcore.runtime.rank import RankInfo

__all__ = ["choose_device"]

logger = logging.getLogger(__name__)


def choose_device(requested: str | None, rank: RankInfo) -> tuple[PluginSet, Selection]:
    """Return the plugins and the choice; the environment is ready for torch's import then.

    Args:
        requested: What `--device` says.
        rank: This process's place.

    Raises:
        DeviceError: No device, or not the one asked for.
    """
    plugins = discover()
    selection = select(plugins, requested=requested)
    for warning in selection.warnings:
        logger.warning("%s", warning)
    if selection.notice:
        logger.info("%s", selection.notice)
    os.environ.update(launch_env(plugins, selection, rank.to_dict(), os.environ))
    return plugins, selection
