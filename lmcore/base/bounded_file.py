"""Reading of small files whose author is not known: regular files up to a size, and nothing else.

A named pipe would be waited for without end, a device has no end, and a large file fills memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["UnreadableFileError", "open_regular", "read_bounded_file"]

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnreadableFileError(OSError):
    """A path that is not a regular file, or a file that is too large; `strerror` is the reason."""


def open_regular(path: str | Path) -> int:
    """Open the regular file at *path* for reading and return its descriptor.

    Raises:
        UnreadableFileError: There is something else than a regular file.
        OSError: The file cannot be opened.
    """
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return descriptor
    os.close(descriptor)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    found = _KINDS.get(kind, "something else")
    raise UnreadableFileError(errno.EINVAL, f"it is {found}, not a file", str(path))


def read_bounded_file(path: str | Path, limit: int) -> bytes:
    """Return the content of the regular file at *path*.

    Args:
        path: Path of the file.
        limit: Largest valid size, in bytes.

    Raises:
        UnreadableFileError: It is no regular file, or larger than *limit*.
        OSError: The file cannot be read.
    """
    with open(open_regular(path), "rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit:,} bytes"
        raise UnreadableFileError(errno.EFBIG, f"it is larger than {size}", str(path))
    return content
