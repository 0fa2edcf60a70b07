"""Trials of plugins in copies of a process, once for each environment and not for each command.

A command loads and probes every plugin in a copy of its process first.  Copies of a process that
has imported torch took a quarter of the time of the tests that run commands.  The results are the
same as long as the entry points and the variables are.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Hashable, Mapping, Sequence
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any

from lmcore.plugin import discovery

HOMES = (sys.prefix, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
"""Folders in which plugins were installed before tests added their own."""
_UNREAD = ("COLUMNS", "FAKE", "HOME", "LINES", "NO_COLOR", "OMP_", "PWD", "PYTEST_", "PYTHON")
"""Beginnings of variables that no installed plugin's probe reads."""


def remember_trials(homes: Sequence[str] = HOMES) -> None:
    """Have `discover` try installed plugins once in this process and its forks.

    Args:
        homes: Folders in which plugins are installed; others, of tests, are tried each time.
    """

    def is_installed(point: EntryPoint) -> bool:
        if not isinstance(point.dist, PathDistribution):
            return False
        place = Path(str(point.dist.locate_file("")))
        return any(place.is_relative_to(home) for home in homes)

    found: dict[Hashable, Any] = {}
    real = discovery._try_in_copy

    def tried(points: Sequence[EntryPoint], env: Mapping[str, str], *, probe: bool) -> Any:
        read = frozenset((name, env[name]) for name in env if not name.startswith(_UNREAD))
        keys = {point.name: (point, probe, read) for point in points if is_installed(point)}
        known = {name: found[key] for name, key in keys.items() if key in found}
        trials = real([point for point in points if point.name not in known], env, probe=probe)
        found.update({keys[name]: trial for name, trial in trials.items() if name in keys})
        return known | trials

    discovery._try_in_copy = tried


def try_ahead() -> None:
    """Try the installed plugins, for the processes that this one forks."""
    points = sorted(
        importlib.metadata.entry_points(group=discovery.GROUP),
        key=lambda point: (point.name, discovery.distribution_of(point)),
    )
    for probe in (True, False):
        discovery._try_in_copy(points, os.environ, probe=probe)
