"""`Continuation`: the command that continues a run which an error or a signal ended at once.

It is printed last, after the error, if the run directory has a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.checkpoint.layout import CHECKPOINTS_NAME, parse_iteration, survey
from lmcore.config.continued import continue_command
from lmcore.errors import CheckpointError

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest

__all__ = ["Continuation"]


class Continuation:
    """State of a run directory at the start, with which its state at the end is compared."""

    def __init__(self, directory: Path | None, start: Path | None) -> None:
        """Find the newest checkpoint in the run directory.

        Args:
            directory: The run directory; None if it is a new one.
            start: Checkpoint from which the run starts; None without one.
        """
        self._start = start
        self._before = None if directory is None else _newest(directory)

    def line(self, directory: Path) -> str | None:
        """Return the line with the command; None if the directory has no complete checkpoint.

        A run that returned to an earlier checkpoint and saved none continues from that one.

        Args:
            directory: The run directory.
        """
        newest = _newest(directory)
        if newest is None:
            return None
        path, manifest = newest
        named, step = directory, manifest.iteration
        start = self._start
        saved = self._before is None or self._before[1].sequence != manifest.sequence
        if not saved and start is not None and start.resolve() != path.resolve():
            named, step = start, parse_iteration(start.name) or 0
        return f"to continue from step {step:,}: `{continue_command(named)}`"


def _newest(directory: Path) -> tuple[Path, Manifest] | None:
    """Return the newest complete checkpoint of a run directory; None if there is none."""
    try:
        return survey(directory / CHECKPOINTS_NAME).newest()
    except CheckpointError:
        return None
