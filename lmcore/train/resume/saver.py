"""`Saver`: writes a run's checkpoints, at once or in a thread while training continues.

A checkpoint is complete or absent, and no two are written at the same time.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lmcore.checkpoint.layout import iteration_path
from lmcore.checkpoint.save import TIMED
from lmcore.idle_work import idle_work_waited_for
from lmcore.signals import TerminatedError
from lmcore.threads import lower_priority, start_optional

if TYPE_CHECKING:
    from lmcore.train.resume.snapshot import Snapshot

__all__ = ["WRITER_NAME", "Saver"]

logger = logging.getLogger(__name__)

WRITER_NAME = "lmcore-checkpoint-writer"


class Saver:
    """Context manager that waits at its exit for the checkpoint that is being written."""

    def __init__(self, take: Callable[[], Snapshot], *, background: bool) -> None:
        """Write nothing yet.

        Args:
            take: Returns a snapshot of the run's state; called on the training thread, never while
                an earlier snapshot is being written.
            background: True to write in a thread (`--async-save`).
        """
        self.take = take
        self.background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, *, timed: bool = False) -> Path:
        """Save the current state and return the directory of the checkpoint.

        All processes must call it.  Waits for an earlier checkpoint first.

        Args:
            timed: True for a checkpoint of `--save-interval-mins`, which the second save after it
                deletes unless `--keep-last` is given.

        Raises:
            CheckpointError: This checkpoint, or the earlier one, could not be written.
            OtherRankError: Another rank could not write its part.
        """
        self.wait()
        snapshot = self.take()
        if timed:
            snapshot = dataclasses.replace(snapshot, meta={**snapshot.meta, TIMED: True})
        if not self.background:
            return snapshot.write()
        # A daemon: a second interrupt ends the run at once, without the unfinished checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name=WRITER_NAME, daemon=True
        )
        if not start_optional(self._thread, without="training waits for the checkpoint"):
            self._thread = None
            return snapshot.write()
        return iteration_path(snapshot.directory, snapshot.iteration)

    def raise_background_error(self) -> None:
        """Raise the error of the last checkpoint, if it failed; do not wait for it.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._thread is not None:
            with idle_work_waited_for():
                self._thread.join()
            self._thread = None
        self.raise_background_error()

    def _write(self, snapshot: Snapshot) -> None:
        lower_priority()  # the training step goes first
        try:
            snapshot.write()
        except BaseException as error:  # noqa: BLE001 - raised on the training thread
            self._error = error

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait, unless the user interrupts; an error of the run takes precedence over its own."""
        if kind is None:
            self.wait()
        elif not issubclass(kind, (KeyboardInterrupt, TerminatedError)):
            try:
                self.wait()
            except Exception as failure:  # noqa: BLE001 - the run ends with its own error
                logger.warning("the last checkpoint was not written: %s", failure)
