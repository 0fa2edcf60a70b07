"""Ends of an evaluation by a signal: as an exception, with a line about what is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lmcore.base.signals import END_SIGNALS, TerminatedError, clean_termination, end_status

__all__ = ["NOTHING_KEPT", "said_at_stop", "say_after_launcher"]

NOTHING_KEPT = "nothing is kept; the same command starts again"
"""Line about an evaluation that writes its results at its end alone."""


@contextmanager
def said_at_stop(kept: str, *, says: bool = True) -> Iterator[None]:
    """Let a signal end the block as an exception, so that no hidden file stays, with a note.

    Args:
        kept: Line about what is kept, which is shown below the name of the signal.
        says: False for a process that leaves the line to another one.

    Raises:
        KeyboardInterrupt, TerminatedError: A signal ended the block.
    """
    try:
        with clean_termination():
            yield
    except (KeyboardInterrupt, TerminatedError) as stopped:
        if says:
            stopped.add_note(kept)
        raise


def say_after_launcher(kept: str, status: int) -> None:
    """Print what is kept if a signal ended the processes of a launcher, below its line.

    Args:
        kept: Line about what is kept.
        status: Exit status of the launcher.
    """
    if status in {end_status(number) for number in END_SIGNALS}:
        sys.stderr.write(f"\n{kept}\n")
