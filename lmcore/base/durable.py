"""Durable writing: a file or directory is complete under its name or absent, also after a crash.

The content goes to a hidden name beside the target, is synced to the disk, and gets its name by one
rename, which is synced, too.  A reader sees the old content or the new.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

__all__ = [
    "AtomicFile",
    "atomic_directory",
    "hidden_path",
    "is_abandoned",
    "is_device",
    "machine",
    "process_token",
    "publish_directory",
    "publish_file",
    "sync_directory",
    "sync_file",
    "write_atomically",
]

_OPEN_FILES = ("/dev/fd/", "/dev/std", "/proc/")
"""Beginnings of the names of a process's open files."""
_tokens: dict[int, str] = {}
_TOKEN = re.compile(r"-([0-9a-f]{8})-(\d+)-[0-9a-f]{8}$", re.ASCII)
_ABANDONED_SECONDS = 3600.0
"""Time without a change after which files of a process that cannot be observed are abandoned."""


class AtomicFile:
    """A new binary file that appears, or replaces an older one, when it is complete.

    As a context manager it gives the stream, and commits unless the block fails.  Without one,
    call `finish`, `commit`, and in any case `close`.  A device or a pipe, such as `/dev/null` and
    `/dev/stdout`, is not replaced: the content is written to it, as it comes.

    Args:
        path: Path of the file; its directory exists.
        buffering: Size of the stream's buffer in bytes; -1: the default size.

    Attributes:
        path: Path of the file.
        temporary: Path of the file until `commit`; of a device or a pipe its own path.
        stream: The open file.

    Raises:
        OSError: The file system refuses.
    """

    def __init__(self, path: Path, *, buffering: int = -1) -> None:
        self.path = path
        self._in_place = is_device(path)
        self.temporary = path if self._in_place else hidden_path(path)
        self.stream: BinaryIO = self.temporary.open("wb", buffering=buffering)

    def finish(self) -> None:
        """Sync the content to the disk and close the stream."""
        if self._in_place:
            self.stream.flush()  # a pipe cannot be synced
        else:
            sync_file(self.stream)
        self.stream.close()

    def commit(self) -> None:
        """Give the finished file its name."""
        if not self._in_place:
            publish_file(self.temporary, self.path)

    def close(self) -> None:
        """Remove the file unless it was committed; may be called again."""
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self.stream.close()
        if not self._in_place:
            self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> BinaryIO:
        """Return the stream."""
        return self.stream

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit, or remove the file if the block failed."""
        try:
            if kind is None:
                self.finish()
                self.commit()
        finally:
            self.close()


def is_device(path: Path) -> bool:
    """Return True for a device, a pipe or a socket, which is written to and never replaced.

    So are the names of a process's open files, as `/dev/stdout`, whatever they lead to.
    """
    if path.is_dir() or not path.exists():
        return False
    return not path.is_file() or str(path.absolute()).startswith(_OPEN_FILES)


def write_atomically(path: Path, content: bytes) -> None:
    """Write the file *path*, or replace it, in one step."""
    with AtomicFile(path) as stream:
        stream.write(content)


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory that gets the name *path* if the block ends without an error.

    Args:
        path: Path of the directory; its parent exists.
        replace: Replace a directory of that name even if it is not empty.

    Raises:
        OSError: The file system refuses, or *path* is there and not to be replaced.
    """
    temporary = hidden_path(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for directory, _, names in os.walk(temporary):
            for name in names:
                with Path(directory, name).open("rb") as file:
                    os.fsync(file.fileno())
            sync_directory(Path(directory))
        publish_directory(temporary, path, replace=replace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hidden_path(path: Path, purpose: str = "tmp") -> Path:
    """Return the hidden name beside *path* that this process uses for *purpose*.

    No other process uses the same name, also not in another container or on another host.
    """
    return path.with_name(f".{path.name}.{purpose}-{process_token()}")


def process_token() -> str:
    """Return the part of a hidden name that identifies this process: machine, id, random digits."""
    pid = os.getpid()
    if pid not in _tokens:  # after a fork, too
        _tokens.clear()
        _tokens[pid] = f"{zlib.crc32(machine().encode()):08x}-{pid}-{os.urandom(4).hex()}"
    return _tokens[pid]


def machine() -> str:
    """Return an identifier of the machine and process namespace in which a process id is valid."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return "/".join(parts)


def is_abandoned(path: Path) -> bool:
    """Return True if the process that gave *path* its hidden name has ended.

    A process id has no meaning outside its machine and process namespace: files of another
    namespace are abandoned if neither they nor the files inside have changed for an hour.
    """
    found = _TOKEN.search(path.name)
    own_place, own_pid, _ = process_token().split("-")
    if found and found[1] == own_place:
        if found[2] == own_pid:
            return True  # this process leaves none behind on purpose
        return not _is_running(int(found[2]))
    try:
        times = [path.lstat().st_mtime, *(inner.lstat().st_mtime for inner in _inside(path))]
    except OSError:
        return False  # its owner is at work
    return time.time() - max(times) > _ABANDONED_SECONDS


def _is_running(pid: int) -> bool:
    """Return True if a process of this machine runs, and is no zombie.

    A zombie has ended; a container's first process may never collect it.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):  # another system than Linux, or the process has ended just now
        return True
    return state not in {b"Z", b"X"}


def _inside(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() and not path.is_symlink() else []


def publish_file(temporary: Path, path: Path) -> None:
    """Give a synced file its name; an older file of that name is replaced."""
    temporary.replace(path)
    sync_directory(path.parent)


def publish_directory(temporary: Path, path: Path, *, replace: bool = False) -> None:
    """Give a synced directory its name.

    With *replace*, an older directory is first renamed to `hidden_path(path, "replaced")`, where a
    process that is killed between the two renames leaves it.

    Raises:
        OSError: The file system refuses, or *path* is there and not to be replaced.
    """
    replaced = hidden_path(path, "replaced")
    if replace and path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    temporary.rename(path)
    sync_directory(path.parent)
    if replace:
        shutil.rmtree(replaced, ignore_errors=True)


def sync_file(file: BinaryIO) -> None:
    """Flush an open file and sync its content to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync the names inside the directory *path* to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
