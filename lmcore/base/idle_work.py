"""Work that is done only while a processor is idle, for saves while training continues.

`lmcore._native` does it, on Linux, in threads of the class `SCHED_IDLE`.  Elsewhere the callers do
it in threads of the lowest priority, which take some time of a training step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from lmcore.base.threads import has_lower_priority

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BackgroundWriter", "background_writer", "idle_work_waited_for", "is_finite_when_idle"]


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


def is_finite_when_idle(tensor: Tensor) -> bool:
    """Return True if a tensor on the host has no NaN and no infinity; other threads go first.

    Args:
        tensor: Tensor of any dtype, in memory that nothing changes meanwhile.
    """
    import torch

    search = getattr(_native(), "is_finite_when_idle", None)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if search is None or dtype not in {"float64", "float32", "bfloat16", "float16"}:
        return bool(torch.isfinite(tensor).all())
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    finite: bool = search(content, dtype)
    return finite


@contextlib.contextmanager
def idle_work_waited_for() -> Iterator[None]:
    """Use more than idle processors while the block waits for such work of this process.

    On a machine that other programs use completely, a thread that only takes what is idle could
    take minutes.  The threads that asked for the work do it then.
    """
    change = getattr(_native(), "set_idle_work_waited_for", None)
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
