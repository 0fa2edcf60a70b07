"""Standard streams of a command: missing ones, encodings, and readers that end before it."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcore.base.errors import LmcoreError

__all__ = [
    "discard_unread",
    "open_closed_streams",
    "outlive_readers",
    "print_every_character",
    "stdout_error",
]

_ESCAPED_OR_BYTE = "lmcore-escaped-or-byte"
"""Error handler of encodings: bytes of paths as they are, other characters as escapes."""


def open_closed_streams() -> None:
    """Open the null device for each standard stream that this process was started without (`>&-`).

    Otherwise the next file to be opened gets its descriptor, and a library that prints there writes
    into that file.
    """
    for fd, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, fd)  # also if they are the same
            os.set_inheritable(fd, True)  # noqa: FBT003
            if null != fd:
                os.close(null)
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


def print_every_character() -> None:
    """Let standard output show what its encoding lacks, such as a byte of a path, as an escape.

    Python does so on standard error.  In the C locale, standard output writes the bytes of paths
    unchanged, and continues to do so.
    """
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    if sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    elif sys.stdout.errors == "surrogateescape":
        codecs.register_error(_ESCAPED_OR_BYTE, _escape_or_byte)
        sys.stdout.reconfigure(errors=_ESCAPED_OR_BYTE)


def _escape_or_byte(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return the byte or the escape of the first character that cannot be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    code = ord(error.object[error.start])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that could not be decoded
        return bytes([code - 0xDC00]), error.start + 1
    error.end = error.start + 1
    return codecs.backslashreplace_errors(error)


@contextlib.contextmanager
def outlive_readers() -> Iterator[None]:
    """Keep this process running when the reader of its output ends (`| head`).

    What is written afterwards is dropped, in child processes too.  Messages on standard error are
    dropped on any other failure as well, such as a full disk.
    """
    before = sys.stdout, sys.stderr
    outliving = _outliving(sys.stdout, drops_all=False), _outliving(sys.stderr, drops_all=True)
    sys.stdout, sys.stderr = outliving
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in outliving:
            stream.flush()


def _outliving(stream: TextIO, *, drops_all: bool) -> TextIO:
    """Return a stream to the same file that outlives its reader."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        fd = stream.fileno()
    except OSError:  # not a file
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Outliving(fd, "w", closefd=False)
    raw.drops_all = drops_all
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Outliving(io.FileIO):
    """A file whose writes succeed after its reader has ended.

    Attributes:
        drops_all: True to drop what cannot be written for any other reason.
    """

    drops_all = False

    def write(self, data: Any) -> int:
        """Write, or drop the data."""
        try:
            return super().write(data)
        except BrokenPipeError:
            _move_to_null(self.fileno())
        except OSError:
            if not self.drops_all:
                raise
        return memoryview(data).nbytes


def discard_unread() -> bool:
    """Discard what is left of output whose reader has ended; return True if there is such output.

    Otherwise the interpreter fails again when it exits.
    """
    import select

    found = False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # not a file
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if poll.poll(0):
                _move_to_null(stream.fileno())
                found = True
    return found


def stdout_error(error: Exception) -> LmcoreError | None:
    """Return the message for an *error* of standard output, such as a full disk; else None.

    If it is one, a line end fails there in the same way.  Python drops the text that could not be
    written, so that a flush alone does not fail again.
    """
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except io.UnsupportedOperation:  # no file
        return None
    except OSError as again:
        if again.errno == error.errno:
            from lmcore.base.errors import LmcoreError

            _move_to_null(sys.stdout.fileno())  # else the interpreter fails again at its exit
            return LmcoreError(f"cannot write to standard output: {error.strerror}")
    return None


def _move_to_null(fd: int) -> None:
    """Let a descriptor write to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
