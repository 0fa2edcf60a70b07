"""Number of processes that a run starts on a host with several devices.

It is one for each device if they can exchange tensors.  A plugin without `lmcore_comm_backends` has
the backend that torch has registered for its device, which only a process that creates the device
can find out: a separate one, because the launcher does not load torch.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from lmcore.base.errors import DeviceError
from lmcore.plugin import HANDED_DOWN, Selection, create_device, discover, launch_env
from lmcore.plugin.isolation.subprocess_call import call_isolated

if TYPE_CHECKING:
    from lmcore.plugin import PluginSet
    from lmcore.runtime.launch.rank import RankInfo

__all__ = ["default_process_count"]

logger = logging.getLogger(__name__)

_SECONDS = 120.0


def default_process_count(plugins: PluginSet, selection: Selection, rank: RankInfo) -> int:
    """Return the number of processes of a run without `--nproc-per-node`; log it if it is reduced.

    Args:
        plugins: Plugins that were found.
        selection: Choice of the device.
        rank: Rank of this process, the launcher.
    """
    count = selection.probe.count
    if count <= 1 or plugins.usable_record(selection.plugin).implements("lmcore_comm_backends"):
        return max(1, count)
    env = {**os.environ, HANDED_DOWN: selection.to_json()}
    env |= launch_env(plugins, selection, rank.to_dict(), env)
    outcome = call_isolated(f"{__name__}:missing_backend", timeout=_SECONDS, env=env)
    if outcome.fault:  # the run's one process reports the error if the device cannot be created
        logger.warning(
            "one process, on 1 of %d devices: the process that creates the device to find its "
            "communication backend failed (%s); `--nproc-per-node %d` starts one for each device "
            "all the same",
            *(count, outcome.fault, count),
        )
        return 1
    if outcome.value is None:
        return count
    logger.info(
        "one process, on 1 of %d devices: processes on them cannot exchange tensors (%s); "
        "`--nproc-per-node %d` needs a backend that is registered with torch, or comes from the "
        "hook `lmcore_comm_backends`",
        *(count, outcome.value, count),
    )
    return 1


def missing_backend() -> str | None:
    """Return the reason why the chosen device has no communication backend; None if it has one."""
    from lmcore.config.load import load_config
    from lmcore.plugin.registrations import plugin_sections
    from lmcore.runtime.process.group import backend_of

    plugins, selection = discover(), Selection.from_json(os.environ[HANDED_DOWN])
    config = load_config([], plugins=plugin_sections(plugins)).config
    try:
        backend_of(plugins, selection, create_device(plugins, selection, config))
    except DeviceError as error:
        return error.why
    return None
