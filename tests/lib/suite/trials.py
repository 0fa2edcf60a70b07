"""Trials of plugins in copies of a process, once for each environment and not for each command.

A command loads and probes every plugin in a copy of its process first.  Copies of a process that
has imported torch took a quarter of the time of the tests that run commands.  The results are the
same as long as the entry points, the import path and the variables are.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Hashable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from lmcore.plugin import discovery

_UNREAD = ("COLUMNS", "HOME", "LINES", "NO_COLOR", "OMP_", "PWD", "PYTEST_", "PYTHON", "TERM")
"""Beginnings of variables that no plugin's probe reads; the import path is compared itself."""


def remember_trials() -> None:
    """Have `discover` try installed plugins once in this process, and in those that it forks.

    Plugins of tests, whose modules are not installed, are tried each time.
    """
    found: dict[Hashable, Any] = {}
    real = discovery._try_in_copy

    def tried(points: Sequence[EntryPoint], env: Mapping[str, str], *, probe: bool) -> Any:
        if not all(map(_is_installed, points)):
            return real(points, env, probe=probe)
        read = frozenset((name, env[name]) for name in env if not name.startswith(_UNREAD))
        key = (*points, probe, read, *sys.path)
        if key not in found:
            found[key] = real(points, env, probe=probe)
        return found[key]

    discovery._try_in_copy = tried


def try_ahead() -> None:
    """Try the installed plugins, for the processes that this one forks."""
    points = sorted(
        importlib.metadata.entry_points(group=discovery.GROUP),
        key=lambda point: (point.name, discovery.distribution_of(point)),
    )
    for probe in (True, False):
        discovery._try_in_copy(points, os.environ, probe=probe)


def _is_installed(point: EntryPoint) -> bool:
    home = None if point.dist is None else Path(str(point.dist.locate_file("")))
    return home is not None and home.is_relative_to(sys.prefix)
