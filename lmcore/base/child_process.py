"""Processes: start time, forking, ending with the parent, killing, and the reason why one ended.

Programs are started by `lmcore.runtime.launch.launcher` (ranks) and
`lmcore.plugin.isolation.subprocess_call` (isolated calls), copies of this process by `fork_child`,
pools of workers by `lmcore.data.worker_pool`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn, Protocol

from lmcore.base.signals import TerminatedError, end_status
from lmcore.base.threads import start_optional

__all__ = [
    "INTERRUPTED",
    "ending",
    "exit_after",
    "fork_child",
    "kill_group",
    "last_line",
    "log_tail",
    "process_start",
    "signal_name",
]

INTERRUPTED = 130
"""Exit status of a process that SIGINT ended, as a shell reports it: 128 + SIGINT."""

_PARENT_GONE = 1
_LOG_BYTES = 65536
_STDERR = 2


def process_start(pid: int) -> float:
    """Return when a process was started, in seconds after the machine's boot.

    Raises:
        psutil.Error: There is no such process, or it cannot be inspected.
    """
    try:
        # Field 22, in ticks.  psutil adds the time of the boot by the wall clock, which jumps if a
        # virtual machine is suspended; importing it takes 10 ms.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:  # no such process, or no Linux
        import psutil

        return float(psutil.Process(pid).create_time() - psutil.boot_time())


def fork_child(work: Callable[[], int]) -> int:
    """Start a copy of this process that ends with the exit status of *work*; return its pid.

    Nothing of this process is cleaned up in the copy, and no exception leaves it.

    Raises:
        OSError: The system gives no more processes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _work_and_exit(work)
    return pid


def _work_and_exit(work: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        status = work()
        sys.stdout.flush()
        sys.stderr.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except TerminatedError as error:
        status = end_status(error.number)
    except BaseException:  # noqa: BLE001 - no exception may reach the parent's frames
        with contextlib.suppress(Exception):
            os.write(_STDERR, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(status)


def exit_after(wait: Callable[[], object]) -> None:
    """Exit at once, from a thread, when *wait* returns: when the parent process has ended."""

    def watch() -> None:
        wait()
        os._exit(_PARENT_GONE)

    thread = threading.Thread(target=watch, name="lmcore-parent", daemon=True)
    start_optional(thread, without="this process continues if its parent ends")


class _Child(Protocol):
    @property
    def pid(self) -> int: ...

    def wait(self) -> int: ...


def kill_group(leader: _Child) -> None:
    """Kill the process group of *leader* and wait for the leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGSEGV"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(status: int) -> str:
    """Describe how a process ended, from its exit status; the negative number of a signal."""
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def log_tail(log: IO[bytes]) -> str:
    """Return the last 64 KiB of a log."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _LOG_BYTES))
    return log.read().decode(errors="replace")


def last_line(log: str) -> str:
    """Return the last line of *log*; empty if there is none."""
    lines = log.strip().splitlines()
    return f"; last line: {lines[-1].strip()}" if lines else ""
