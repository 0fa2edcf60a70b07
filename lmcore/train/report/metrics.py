"""Step records in `metrics.jsonl` and in TensorBoard events: one row for each step."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from lmcore.base.errors import RunError

if TYPE_CHECKING:
    from lmcore.config.section import LoggingSection
    from lmcore.train.step_record import StepRecord

__all__ = ["MetricsFile", "TensorBoard"]

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 30.0
_BLOCK = 1 << 16
_LONGEST_ROW = 1 << 20


class MetricsFile:
    """Appends rows to `metrics.jsonl`; each row is in the page cache at once.

    Attributes:
        path: Path of the file.
        last_row: Last row of an earlier part of the run; empty without one.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        """Open the file, and drop the rows of steps after *after_step*, which will be taken again.

        Raises:
            RunError: The file cannot be written, or is a symbolic link.
        """
        self.path = path
        self.last_row: dict[str, Any] = {}
        if path.is_symlink():
            raise RunError(
                f"`{path}` is a symbolic link",
                why="the run would change the file that it leads to",
                hint="remove the link; to continue the run, move that file to its place",
            )
        try:
            if path.exists():
                _drop_later(path, after_step)
                self.last_row = _last_row(path)
            self._file = path.open("a+b", buffering=0)
        except OSError as cause:
            why = cause.strerror or str(cause)  # a named pipe's error has only a text
            raise RunError(f"`{path}` cannot be written", why=why) from cause

    def is_in_place(self) -> bool:
        """Return True if the path still names the open file."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return False

    def write_again(self) -> None:
        """Write all rows to a new file at the path, and continue in that file.

        Raises:
            RunError: The file system refuses.
        """
        old = self._file
        try:
            new = self.path.open("a+b", buffering=0)
            old.seek(0)
            shutil.copyfileobj(old, new)
        except OSError as cause:
            raise RunError(f"`{self.path}` cannot be written", why=str(cause.strerror)) from cause
        self._file = new
        old.close()

    def write(self, row: StepRecord) -> None:
        """Append one row, whole or not at all.

        Raises:
            RunError: The file system refuses.
        """
        left = memoryview((json.dumps(row.to_dict(), allow_nan=False) + "\n").encode())
        end = self._file.seek(0, os.SEEK_END)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as cause:
            self._file.truncate(end)
            raise RunError(
                f"`{self.path}` cannot be written",
                why=str(cause.strerror),
                hint="free some space and continue from the last checkpoint with `--load`",
            ) from cause

    def __enter__(self) -> Self:
        """Return the open file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._file.close()


def _drop_later(path: Path, after_step: int) -> None:
    """Truncate the file after the last row up to a step: later rows and torn lines are dropped.

    The file is read backwards from its end, since steps increase.
    """
    with path.open("r+b") as file:
        end = _end_of_rows(file, after_step) if after_step else 0
        file.truncate(end)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":  # the row lost only its line end
                file.write(b"\n")


def _last_row(path: Path) -> dict[str, Any]:
    """Return the last row of a file without torn lines; empty if there is none."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _BLOCK))
        lines = file.read().splitlines()
    return dict(json.loads(lines[-1])) if lines and _step_of(lines[-1]) is not None else {}


def _end_of_rows(file: BinaryIO, after_step: int) -> int:
    """Return the offset behind the last row whose step is at most *after_step*."""
    position = size = file.seek(0, os.SEEK_END)
    rest = b""  # first part of the block read before, which ends a line that begins earlier
    while position:
        start = max(0, position - _BLOCK)
        file.seek(start)
        block = file.read(position - start) + rest
        first, *lines = block.split(b"\n")
        end = start + len(block)
        for line in reversed([first, *lines] if start == 0 else lines):
            step = _step_of(line)
            if step is not None and step <= after_step:
                return min(end + 1, size)
            end -= len(line) + 1
        rest = first if len(first) < _LONGEST_ROW else b""
        position = start
    return 0


def _step_of(line: bytes) -> int | None:
    """Return the step of a row; None for a line that is not a row."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class TensorBoard:
    """Writes rows as TensorBoard scalars; the library is loaded with the first row.

    If writing fails, a warning is logged and the run continues without events: `metrics.jsonl` has
    the same numbers.  Events are written on the calling thread, because the library's own thread
    would end silently on a full disk, and the run would wait for it.
    """

    def __init__(self, directory: Path, settings: LoggingSection) -> None:
        """Open nothing yet.

        Args:
            directory: Folder of the event files.
            settings: Interval, queue size and tags.
        """
        self.directory = directory
        self.interval = settings.tensorboard_log_interval
        self.queue_size = settings.tensorboard_queue_size
        self._tags = _TAGS[settings.tensorboard_tags]
        self._writer: Any = None
        self._ended = False
        self._held = 0
        self._flushed_at = 0.0

    def write(self, row: StepRecord) -> None:
        """Write the scalars of a step, at the interval and with every validation and score."""
        between = row.step % self.interval and row.valid_loss is None and not row.tasks
        if self._ended or between:
            return
        try:
            if self._writer is None:
                self._writer = self._open(row.step)
            for event in _events(row, self._tags):
                self._writer.write(event.SerializeToString())
                self._held += 1
            if self._held >= self.queue_size or time.monotonic() >= (
                self._flushed_at + _FLUSH_SECONDS
            ):
                self._writer.flush()
                self._held, self._flushed_at = 0, time.monotonic()
        except OSError as cause:
            self._give_up(cause)

    def close(self) -> None:
        """Write the events that are still queued."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as cause:
            self._give_up(cause)
        self._writer = None

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

    def _give_up(self, cause: OSError) -> None:
        self._ended = True
        logger.warning("no more TensorBoard events: %s: %s", self.directory, cause.strerror)
        if self._writer is not None:
            with contextlib.suppress(OSError):  # fails again with the queued events, and drops them
                self._writer.close()
        self._writer = None


def _events(row: StepRecord, tags: Mapping[str, Scalar]) -> Iterator[Any]:
    """Yield an event for each position on the horizontal axis: the step, and the samples."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    known, now = _numbers(row), time.time()
    by_position: dict[int, list[Any]] = {}
    for tag, (name, position, factor) in {**tags, **_further(row, tags)}.items():
        if name in known and math.isfinite(known[name]):
            value = Summary.Value(tag=tag, simple_value=known[name] * factor)
            by_position.setdefault(getattr(row, position), []).append(value)
    for at, values in by_position.items():
        yield Event(wall_time=now, step=at, summary=Summary(value=values))


def _further(row: StepRecord, tags: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the tags of a family's several losses and accuracies."""
    found: dict[str, Scalar] = {}
    megatron = tags is _TAGS["megatron"]
    for part, names in (("train", row.losses), ("valid", row.valid)):
        for name in names:
            column = name if part == "train" else f"valid_{name}"
            words = name.replace("_", " ") + " validation" * (part == "valid")
            found[words if megatron else f"{part}/{name}"] = (column, "step", 1.0)
            if megatron:
                found[f"{words} vs samples"] = (column, "consumed_samples", 1.0)
    found |= {name: (name, "step", 1.0) for name in _nested(row)}
    return found


def _numbers(row: StepRecord) -> dict[str, float]:
    """Return the numbers of a row by name; of its parts as "tasks/NAME/METRIC"."""
    plain = {name: one for name, one in row.to_dict().items() if not isinstance(one, dict)}
    return {**plain, **_nested(row)}


def _nested(row: StepRecord) -> dict[str, float]:
    sets = {
        f"valid/{part}/{name}": value
        for part, values in row.valid_sets.items()
        for name, value in values.items()
    }
    return sets | {
        f"tasks/{task}/{name}": value
        for task, values in row.tasks.items()
        for name, value in values.items()
        if value is not None and name != "examples"
    }


Scalar = tuple[str, str, float]
"""Name of a number in a row, of the number that is its position, and a factor of the value."""

_SHARED = {
    **{f"speed/{name}": name for name in ("tokens_per_second", "step_time_ms", "data_wait_ms")},
    **{f"speed/rank_time_{name}_ms": f"rank_time_{name}_ms" for name in ("min", "median", "max")},
    **{f"speed/{name}": name for name in ("mfu", "compilations", "compile_seconds")},
    "train/skipped_iterations": "skipped_iterations",
}
"""Numbers by their tags that Megatron does not record, or not as a scalar."""
_OWN = {
    **{f"train/{name}": name for name in ("loss", "grad_norm", "learning_rate", "loss_scale")},
    "train/global_batch_size": "global_batch_size",
    "valid/loss": "valid_loss",
    "valid/perplexity": "valid_perplexity",
}
_MEGATRON = {
    "lm loss": "loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "loss-scale": "loss_scale",
    "batch-size": "global_batch_size",
    "lm loss validation": "valid_loss",
    "lm loss validation ppl": "valid_perplexity",
}
"""Numbers by Megatron's tags; each also has one with ` vs samples`."""


def _by_step(tags: Mapping[str, str]) -> dict[str, Scalar]:
    return {tag: (name, "step", 1.0) for tag, name in tags.items()}


_TAGS: Mapping[str, Mapping[str, Scalar]] = {
    "lmcore": _by_step({**_OWN, **_SHARED}),
    "megatron": {
        **_by_step({**_MEGATRON, **_SHARED}),
        **{f"{tag} vs samples": (name, "consumed_samples", 1.0) for tag, name in _MEGATRON.items()},
        "iteration-time": ("step_time_ms", "step", 1e-3),  # in seconds
    },
}
"""Scalars by tag, for each value of `--tensorboard-tags`."""
