"""Start and end of the processes of a command on this host."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lmcore.cli.device_count import default_process_count
from lmcore.cli.selection import find_plugins
from lmcore.plugin import HANDED_DOWN, launch_env
from lmcore.runtime import torch_import
from lmcore.runtime.device_choice import select_device
from lmcore.runtime.launch.rank import RankInfo

if TYPE_CHECKING:
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.node_place import NodePlace

__all__ = ["import_torch", "leave", "start_on_node", "start_processes"]


def start_processes(
    argv: Sequence[str],
    num_processes: int,
    plugins: PluginSet,
    selection: Selection,
    *,
    module: str,
    dialogue: bool = False,
    failed: Callable[[Path], None] = lambda _directory: None,
) -> int:
    """Run a command once for each process of a run, on the chosen device; return its exit status.

    Args:
        argv: Command and its arguments, the same for all ranks.
        num_processes: Number of processes.
        plugins: Plugins that were found.
        selection: Choice of the device, which the processes keep.
        module: Module that forked processes share, imported before.
        dialogue, failed: See `launch`.

    Raises:
        RunError: A process could not be started.
    """
    from lmcore.cli.main import main
    from lmcore.runtime.launch.launcher import launch

    return launch(
        [sys.executable, "-m", "lmcore.cli.main", *argv],
        num_processes,
        {**os.environ, HANDED_DOWN: selection.to_json()},
        function=lambda: main(list(argv)),
        load=lambda: _import_for(num_processes, plugins, selection, module),
        dialogue=dialogue,
        failed=failed,
    )


def start_on_node(argv: Sequence[str], node: NodePlace, *, all_output: bool = False) -> int:
    """Start the processes of a command on this node of several; return their exit status.

    Each process plans the run and chooses its device, as under other launchers.

    Args:
        argv: Command and its arguments.
        node: Place of this host among the nodes.
        all_output: See `launch`.

    Raises:
        RunError: A process could not be started.
    """
    from lmcore.runtime.launch.launcher import launch

    count = node.per_node
    if count is None:
        plugins = find_plugins(argv[1:])
        selection = select_device(plugins, None, RankInfo())
        count = default_process_count(plugins, selection, RankInfo())
    safe_path = ["-P"] if sys.flags.safe_path else []
    return launch(
        [sys.executable, *safe_path, "-m", "lmcore.cli.main", *argv],
        count,
        os.environ,
        all_output=all_output,
        node=node,
    )


def _import_for(num_processes: int, plugins: PluginSet, selection: Selection, module: str) -> None:
    """Import torch and a module for processes that will be forks of this one.

    Libraries read the environment when they are loaded: if the plugins set it differently for each
    process, nothing is imported here.
    """
    size = num_processes
    places = [RankInfo(rank, rank, size, size).to_dict() for rank in range(size)]
    first, *others = (launch_env(plugins, selection, place, os.environ) for place in places)
    if any(one != first for one in others):
        return
    os.environ.update(first)
    import_torch()
    importlib.import_module(module)


def import_torch() -> None:
    """Import torch, whose objects are never garbage: no collection traverses them, now or later.

    Raises:
        PluginError: A backend that another package adds to torch cannot be loaded.
    """
    if "torch" in sys.modules:
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        torch_import.import_torch()
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def leave() -> NoReturn:
    """Exit one of several processes after everything is written and closed.

    At Python's own exit, threads of communication libraries may still run while C++ destroys their
    objects, which aborts a process that has done all its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
