"""Writes a run's checkpoints: at once, or in a thread while training goes on (`--async-save`).

Either way a checkpoint is complete or absent, and no two are written at the same time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lmcore.checkpoint.layout import iteration_path

if TYPE_CHECKING:
    from lmcore.train.resume.snapshot import Snapshot

__all__ = ["WRITER_NAME", "Saver"]

logger = logging.getLogger(__name__)

WRITER_NAME = "lmcore-checkpoint-writer"


class Saver:
    """A context manager; leaving it waits for the checkpoint that is being written."""

    def __init__(self, take: Callable[[], Snapshot], *, background: bool) -> None:
        """Write what *take* returns.

        Args:
            take: Brings the run's state to the host; called on the training thread, never while
                an earlier snapshot is being written.
            background: Whether to write in a thread.
        """
        self.take = take
        self.background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self) -> Path:
        """Save the state of this moment and return the directory that the checkpoint has, or gets.

        Waits for an earlier one first; all processes of a run must call it.

        Raises:
            CheckpointError: This one, or the earlier one, could not be written.
            OtherRankError: So it is for another process.
        """
        self.wait()
        snapshot = self.take()
        if not self.background:
            return snapshot.write()
        # Whoever interrupts the run twice is not made to wait: an unfinished one is then absent.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name=WRITER_NAME, daemon=True
        )
        self._thread.start()
        return iteration_path(snapshot.directory, snapshot.iteration)

    def check(self) -> None:
        """Raise what kept the last checkpoint from being written; does not wait.

        Raises:
            CheckpointError: It could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, snapshot: Snapshot) -> None:
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
        """Wait, unless the user interrupts; an error of the run itself matters more than ours."""
        if kind is None:
            self.wait()
        elif not issubclass(kind, KeyboardInterrupt):
            try:
                self.wait()
            except Exception as failure:  # noqa: BLE001 - the run ends with its own error
                logger.warning("the last checkpoint was not written: %s", failure)
