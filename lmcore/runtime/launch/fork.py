"""Worker processes that are forked from the launcher, with the modules that it has imported.

Neither threads nor a device library's state survive a fork: the launcher may have imported torch,
but must not have used it.  If `can_fork` returns False, the launcher starts new programs instead.
Torch-free.
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

from lmcore.base.child_process import fork_child

__all__ = ["ForkedProcess", "can_fork", "fork"]

_THREADS = Path("/proc/self/task")
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def can_fork() -> bool:
    """Return True if a forked process can do all that a new one can.

    It cannot if this process has other threads, which a fork lacks.  Libraries that handle forks
    end their threads before one and start them again on demand: so the threads are counted after a
    fork that does nothing.
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
    """A forked process, with the part of `subprocess.Popen` that a launcher needs.

    Attributes:
        pid: Process and session id.
        stdout: None: it is not copied.
        stderr: Pipe from its standard error; None if it has this process's.
    """

    pid: int
    stderr: IO[bytes] | None
    stdout: None = None
    _status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self._status is None:
            self._see(os.WNOHANG)
        return self._status

    def wait(self) -> int:
        """Wait for it to end and return the exit status."""
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
    """Fork a process, in a new session, that runs *function*.

    Args:
        function: Function that returns the exit status.
        env: Environment of the process.
        shown: True if it shares standard input, output and error with this process; else it reads
            and writes the null device, and its standard error is a pipe.
        close: Called in the forked process to close files of this process.

    Raises:
        OSError: The system gives no more processes, or no more files.
    """

    def work() -> int:
        os.setsid()
        close()
        if stderr is not None and own_stderr is not None:
            stderr.close()
            _move(own_stderr, _STDERR)
            _move(Path(os.devnull).open("rb"), _STDIN)  # noqa: SIM115  # for its life
            sys.stdin = open(_STDIN, closefd=False, encoding="utf-8")  # noqa: SIM115
            _move(Path(os.devnull).open("wb"), _STDOUT)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        return function()

    with contextlib.ExitStack() as failed:
        stderr, own_stderr = (None, None) if shown else _pipe(failed)
        pid = fork_child(work)
        failed.pop_all()
    if own_stderr is not None:
        own_stderr.close()
    return ForkedProcess(pid, stderr)


def _pipe(failed: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return both ends of a pipe."""
    reader, writer = os.pipe()
    return (
        failed.enter_context(os.fdopen(reader, "rb")),
        failed.enter_context(os.fdopen(writer, "wb")),
    )


def _move(stream: IO[bytes], target: int) -> None:
    """Give *stream* the file descriptor *target*."""
    if stream.fileno() != target:
        os.dup2(stream.fileno(), target)
        stream.close()
