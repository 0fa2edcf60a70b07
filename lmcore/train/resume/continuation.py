"""`Continuation`: the command that continues a run which an error or a signal ended at once.

It is printed last, after the error, if the run directory has a checkpoint.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from lmcore.checkpoint.layout import CHECKPOINTS_NAME, parse_iteration, survey
from lmcore.checkpoint.manifest import MANIFEST_NAME
from lmcore.config.continued import continue_command
from lmcore.errors import CheckpointError

__all__ = ["Continuation"]


class Continuation:
    """State of a run directory at the start, with which its state at the end is compared."""

    def __init__(self, directory: Path | None, start: Path | None) -> None:
        """Note the checkpoints in the run directory, without reading them.

        Args:
            directory: The run directory; None if it is a new one.
            start: Checkpoint from which the run starts; None without one.
        """
        self._start = start
        self._before = set() if directory is None else _times(directory)

    def line(self, directory: Path) -> str | None:
        """Return the line with the command; None if the directory has no complete checkpoint.

        A run that returned to an earlier checkpoint and saved none continues from that one.

        Args:
            directory: The run directory.
        """
        try:
            path, manifest = survey(directory / CHECKPOINTS_NAME).newest()
        except (CheckpointError, OSError):
            return None
        named, step = directory, manifest.iteration
        start, saved = self._start, _times(directory) - self._before
        if not saved and start is not None and start.resolve() != path.resolve():
            named, step = start, parse_iteration(start.name) or 0
        return f"to continue from step {step:,}: `{continue_command(named)}`"


def _times(directory: Path) -> set[tuple[str, int]]:
    """Return name and time of each checkpoint in a run directory."""
    found = set()
    for path in (directory / CHECKPOINTS_NAME).glob(f"iter_*/{MANIFEST_NAME}"):
        with contextlib.suppress(OSError):
            found.add((path.parent.name, path.stat().st_mtime_ns))
    return found
