"""Step records in `metrics.jsonl`: one row for each step."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from lmcore.base.errors import RunError

if TYPE_CHECKING:
    from lmcore.train.step_record import StepRecord

__all__ = ["MetricsFile"]

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
