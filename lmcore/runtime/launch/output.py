"""Output of a worker process that its launcher copies line by line, each with the rank.

Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

__all__ = ["CopiedOutput"]

_READ_BYTES, _MAX_READS = 1 << 16, 16


@dataclass
class CopiedOutput:
    """Output of a worker that is copied to this process's, each line with the rank.

    Attributes:
        source: Pipe from the worker.
        target: Name of the stream of `sys`: "stdout" or "stderr".
        rank: Rank of the worker.
        unfinished: Start of a line that has not ended.
    """

    source: IO[bytes]
    target: str
    rank: int
    unfinished: bytes = b""

    def copy(self) -> None:
        """Copy the lines that have arrived, at most a megabyte.

        No thread does this: the system may have none left.
        """
        if self.source.closed:
            return
        os.set_blocking(self.source.fileno(), False)
        for _ in range(_MAX_READS):
            try:
                data = os.read(self.source.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            *lines, rest = (self.unfinished + data).split(b"\n")
            self.unfinished = _last_bar(rest)
            if not data:  # the end
                lines, self.unfinished = [line for line in [self.unfinished] if line], b""
            self._write(lines)
            if not data:
                return

    def _write(self, lines: Sequence[bytes]) -> None:
        mark = f"[rank {self.rank}] ".encode()
        stream = getattr(sys, self.target).buffer
        with contextlib.suppress(OSError):  # a full disk: the worker's pipe is still emptied
            for full_line in lines:
                line = _last_bar(full_line).rstrip(b"\r")
                marked = line if line.startswith(b"[rank ") else mark + line
                stream.write(marked + b"\n")
            stream.flush()


def _last_bar(line: bytes) -> bytes:
    """Return what a terminal shows of a line: the text after its last carriage return but one.

    A progress bar returns to the start of its line for each update.
    """
    return line[line.rfind(b"\r", 0, -1) + 1 :]
