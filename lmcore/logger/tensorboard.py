"""TensorBoard's event files, written on the thread that trains.

The library's own thread would end silently on a full disk, and the run would wait for it.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from lmcore.model.run_logger import LoggedRun, OpenLogger, StepMetrics

__all__ = ["TensorBoard", "open_tensorboard"]

_FLUSH_SECONDS = 30.0


def open_tensorboard(run: LoggedRun) -> TensorBoard:
    """Return the writer of a run's events: `--tensorboard`."""
    settings = run.config.logging
    folder = settings.tensorboard_dir or run.directory / "tensorboard"
    return TensorBoard(Path(folder), settings.tensorboard_queue_size)


class TensorBoard(OpenLogger):
    """Writer of scalars and texts as events; the library is loaded with the first of them."""

    def __init__(self, directory: Path, queue_size: int) -> None:
        """Open nothing yet.

        Args:
            directory: Folder of the event files.
            queue_size: Number of events that are held before they are written.
        """
        self.directory = directory
        self.queue_size = queue_size
        self._writer: Any = None
        self._held = 0
        self._flushed_at = 0.0

    def log(self, metrics: StepMetrics) -> None:
        """Write an event for each position: the step, and the samples."""
        from tensorboardX.proto.summary_pb2 import Summary

        for position, values in (
            (metrics.step, metrics.values),
            (metrics.samples, metrics.by_samples),
        ):
            scalars = [Summary.Value(tag=tag, simple_value=one) for tag, one in values.items()]
            if scalars:
                self._write(Summary(value=scalars), position, metrics.step)
        if self._held >= self.queue_size or time.monotonic() >= self._flushed_at + _FLUSH_SECONDS:
            self._writer.flush()
            self._held, self._flushed_at = 0, time.monotonic()

    def text(self, name: str, text: str, step: int) -> None:
        """Write an event for the page of texts."""
        from tensorboardX.summary import text as text_summary

        self._write(text_summary(name, text), step, step)

    def directory_lost(self) -> None:
        """Open a new file with the next event."""
        self.close("")

    def close(self, status: str) -> dict[str, float]:
        """Write the events that are still queued."""
        del status
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return {}

    def _write(self, summary: Any, position: int, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if self._writer is None:
            self._writer = self._open(step)
        event = Event(wall_time=time.time(), step=position, summary=summary)
        self._writer.write(event.SerializeToString())
        self._held += 1

    def _open(self, step: int) -> Any:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event

        self.directory.mkdir(parents=True, exist_ok=True)
        # Process and step distinguish runs that start within one second.
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{os.getpid()}.{step}"
        writer = RecordWriter(str(self.directory / name))
        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        writer.write(version.SerializeToString())
        return writer
