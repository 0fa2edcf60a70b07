"""Ranks that begin as copies of the launcher, with all that it has imported and read.

What a thread has begun does not survive a copy, nor what a device's library has: the launcher may
have imported torch, and has done nothing with it.  `can_fork` says whether a copy may be made;
where not the launcher starts programs anew.  Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lmcore.child_process import fork_child

__all__ = ["ForkedProcess", "can_fork", "fork"]

_THREADS = Path("/proc/self/task")
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def can_fork() -> bool:
    """Return whether a copy of this process can do all that a new one could.

    It cannot where another thread would be missing in it.  Libraries that know of copies end their
    threads for one, and start them again when they need them: after a copy that does nothing it
    is seen who is left.
    """
    if threading.active_count() > 1 or not _THREADS.exists():
        return False
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(list(_THREADS.iterdir())) == 1


@dataclass
class ForkedProcess:
    """A copy of this process; the part of `subprocess.Popen` that a launcher needs.

    Attributes:
        pid: Of the copy, and of its process group.
        stdin: Writes to its standard input.
        stderr: Reads its standard error; None where that is this process's.
    """

    pid: int
    stdin: IO[bytes]
    stderr: IO[bytes] | None
    _status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self._status is None:
            self._see(os.WNOHANG)
        return self._status

    def wait(self) -> int:
        """Wait for its end and return the exit status."""
        if self._status is None:
            self._see(0)
        assert self._status is not None
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _see(self, options: int) -> None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)


def fork(
    function: Callable[[], int],
    env: Mapping[str, str],
    *,
    shown: bool,
    close: Callable[[], None],
) -> ForkedProcess:
    """Start a copy of this process, in a process group of its own, that does *function*.

    Its standard input ends when this process does.

    Args:
        function: What it does; returns its exit status.
        env: Its environment.
        shown: Whether it writes where this process writes; else its standard output is dropped,
            and its standard error is to be read.
        close: Closes in the copy what is this process's alone.

    Raises:
        OSError: The system gives no more processes, or no more files.
    """

    def work() -> int:
        os.setpgid(0, 0)
        close()
        for one in filter(None, (stdin, stderr)):
            one.close()
        _move(own_stdin, _STDIN)
        sys.stdin = open(_STDIN, closefd=False, encoding="utf-8")  # noqa: SIM115  # for its life
        if own_stderr is not None:
            _move(own_stderr, _STDERR)
            _move(Path(os.devnull).open("wb"), _STDOUT)  # noqa: SIM115  # for its life
        os.environ.clear()
        os.environ.update(env)
        return function()

    with contextlib.ExitStack() as failed:
        own_stdin, stdin = _pipe(failed)
        stderr, own_stderr = (None, None) if shown else _pipe(failed)
        pid = fork_child(work)
        failed.pop_all()
    with contextlib.suppress(OSError):  # whoever is first: it may be signalled from here on
        os.setpgid(pid, pid)
    for one in filter(None, (own_stdin, own_stderr)):
        one.close()
    return ForkedProcess(pid, stdin, stderr)


def _pipe(failed: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return both ends of a pipe."""
    reader, writer = os.pipe()
    return (
        failed.enter_context(os.fdopen(reader, "rb")),
        failed.enter_context(os.fdopen(writer, "wb")),
    )


def _move(stream: IO[bytes], target: int) -> None:
    """Make *stream* that of the number *target*."""
    if stream.fileno() != target:
        os.dup2(stream.fileno(), target)
        stream.close()
