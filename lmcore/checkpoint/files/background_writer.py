"""Files that are written only while a processor is idle, for saves while training continues.

`lmcore._native` writes them, on Linux.  Without it `lmcore.checkpoint.files.block_writer` does, in
threads of the lowest priority, which take some time of a training step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, Protocol

from lmcore.threads import has_lower_priority

__all__ = ["BackgroundWriter", "background_writer", "writing_waited_for"]


class BackgroundWriter(Protocol):
    """Interface of `lmcore._native.BackgroundWriter`; its calls release the GIL."""

    checksum: int
    """CRC-32 of the bytes so far."""
    error: int
    """`errno` of the first write that failed, 0 for none; bytes after it are dropped."""

    def append(self, content: memoryview) -> None:
        """Copy bytes, and write each block that is full."""

    def finish(self) -> None:
        """Write the rest; something else may write to the file from then on."""


def background_writer(descriptor: int) -> BackgroundWriter | None:
    """Return the writer of a file that a thread with lower priority saves; None in other threads.

    It is None, too, where `lmcore._native` was not built, or the system is not Linux.

    Args:
        descriptor: File, open for writing.
    """
    kind = getattr(_native(), "BackgroundWriter", None)
    if kind is None or not has_lower_priority():
        return None
    writer: BackgroundWriter = kind(descriptor)
    return writer


@contextlib.contextmanager
def writing_waited_for() -> Iterator[None]:
    """Write with more than idle processors while the block waits for files of this process.

    On a machine that other programs use completely, a thread that only takes what is idle could
    take minutes.  The threads that called the writers write then.
    """
    change = getattr(_native(), "set_writers_waited_for", None)
    if change is None:
        yield
        return
    change(value=True)
    try:
        yield
    finally:
        change(value=False)


@functools.cache
def _native() -> Any:
    try:
        return importlib.import_module("lmcore._native")
    except ImportError:
        return None
