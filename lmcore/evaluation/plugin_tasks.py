"""Tasks that can be named: lmcore's own, and the plugins'.  Torch-free."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import PluginError
from lmcore.evaluation.task import Task
from lmcore.evaluation.tasks import TASKS
from lmcore.plugin.record import describe
from lmcore.plugin.registrations import plugin_tasks

if TYPE_CHECKING:
    from lmcore.contract.registry import PluginTask
    from lmcore.plugin.record import PluginRecord, PluginSet

__all__ = ["KnownTasks", "known_tasks", "load_task"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownTasks:
    """Tasks by their origin.

    Attributes:
        own: lmcore's.
        added: The plugins', each with the name of its distribution.
    """

    own: tuple[Task, ...]
    added: tuple[tuple[Task, str], ...]

    @property
    def all(self) -> tuple[Task, ...]:
        """Every task."""
        return (*self.own, *(task for task, _ in self.added))


def known_tasks(plugins: PluginSet) -> KnownTasks:
    """Return all tasks; one of a plugin that cannot be loaded is left out with a warning.

    Args:
        plugins: Plugins that were found.

    Raises:
        PluginError: Two plugins have a task of one name.
    """
    found = plugin_tasks(plugins, dict.fromkeys((task.name for task in TASKS), "lmcore"))
    added = []
    for name, one in found.items():
        record = found.plugins[name]
        try:
            added.append((load_task(one, record), record.distribution))
        except PluginError as error:
            logger.warning("the task `%s` is left out: %s", name, error)
    return KnownTasks(TASKS, tuple(added))


def load_task(one: PluginTask, record: PluginRecord) -> Task:
    """Return the record of a plugin's task.

    Args:
        one: Registration of the task.
        record: The plugin.

    Raises:
        PluginError: It cannot be loaded, is no record of a task, or has another name.
    """
    what = f"task `{one.name}` of plugin {record.label} cannot be loaded"
    hint = f"update or remove `{record.distribution}`, or report this to its authors"
    module, _, name = one.load.partition(":")
    try:
        task = getattr(importlib.import_module(module), name)
    except Exception as cause:
        raise PluginError(what, why=f"`{one.load}` raised {describe(cause)}", hint=hint) from cause
    if not isinstance(task, Task):
        why = f"`{one.load}` is {task!r:.200}, not a `lmcore.evaluation.task.Task`"
        raise PluginError(what, why=why, hint=hint)
    if task.name != one.name:
        raise PluginError(what, why=f"the name of `{one.load}` is `{task.name}`", hint=hint)
    return task
