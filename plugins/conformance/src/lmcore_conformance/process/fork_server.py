"""Fork server: a process that has imported torch and the checks, and forks the processes of groups.

Each group then has a separate process without importing torch again, which takes seconds.  The
server uses no plugin, initialises no device and has no threads; if it has threads or an open device
after its imports, or if torch loads a device's package by itself, groups run in new interpreters.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcore.base.child_process import fork_child
from lmcore.plugin.isolation.subprocess_call import Running, answer, start_program
from lmcore.runtime.launch.fork import can_fork
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.store import SECRET

__all__ = ["ForkServer", "serve"]

_THREADS = "OMP_NUM_THREADS"
_OWN = {*RankInfo().to_env(), "MASTER_ADDR", "MASTER_PORT", SECRET, _THREADS}
"""Variables that may differ between the server and a forked process.

They are read when ranks join, but for the number of threads: plugins divide the host's cores among
ranks, and a forked process has torch use the number for its rank.
"""

_TORCH_LOADS = "torch.backends"
"""Entry points that `import torch` loads."""

_IMPORT_SECONDS = 120.0
"""Until the server has made its imports; later, groups run in new interpreters."""

_BOOTSTRAP = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = [*given, *(path for path in sys.path if path not in given)]
from lmcore_conformance.process.fork_server import serve
raise SystemExit(serve())
"""


class ForkServer:
    """The server, as its client in this process sees it; it ends with this object."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start the server with the environment of the processes; it imports meanwhile."""
        self._env, self._threads = _shared(env), env.get(_THREADS)
        self._ready: bool | None = None
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path)],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        weakref.finalize(self, _close, self._process)

    def start(self, env: Mapping[str, str] | None, arguments: Sequence[str], log: Path) -> Running:
        """Fork a process that makes a call, or start an interpreter if no fork can replace one.

        Args:
            env: Environment of the process.
            arguments: Arguments of `lmcore.plugin.isolation.subprocess_call.answer`.
            log: File for its standard error.
        """
        if env is not None and _shared(env) == self._env and self._has_threads(env):
            if self._ready is None:
                stdout = self._process.stdout
                assert stdout is not None
                imported, _, _ = select.select([stdout], [], [], _IMPORT_SECONDS)
                self._ready = bool(imported) and self._reply() is True
            pid = self.request("start", dict(env), list(arguments), str(log))
            if pid is not None:
                return _Forked(self, pid)
        return start_program(env, arguments, log)

    def _has_threads(self, env: Mapping[str, str]) -> bool:
        """Return True if a forked process can have the number of threads that *env* asks for."""
        wanted = env.get(_THREADS)
        return wanted == self._threads or (wanted is not None and wanted.isdecimal())

    def request(self, *values: Any) -> Any:
        """Return the reply to a request; None if the server cannot serve it."""
        if not self._ready:
            return None
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(f"{json.dumps(values)}\n".encode())
            stdin.flush()
        except OSError:
            return None
        return self._reply()

    def _reply(self) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self._ready = False
            return None
        return json.loads(line)


class _Forked:
    """A process that the server has forked."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self._pid = pid
        self.status: int | None = None

    def has_ended(self) -> bool:
        if self.status is None:
            self._see("poll")
        return self.status is not None

    def kill(self) -> None:
        if self.status is None:
            self._see("kill")

    def _see(self, verb: str) -> None:
        reply = self._server.request(verb, self._pid)
        if reply is None:  # the server was killed
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            reply = [-signal.SIGKILL]
        (self.status,) = reply


def _shared(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _OWN}


def _close(process: subprocess.Popen[bytes]) -> None:
    """End the server, and with it the processes that it has forked."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve() -> int:
    """Import what the processes of groups need, and serve requests until the client has ended.

    Requests and replies are lines of JSON: "start" gives the pid, "poll" and "kill" a list of the
    exit status, null while the process runs.
    """
    # What a library writes on standard output at its import is no reply.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def write(value: Any) -> None:
        replies.write(f"{json.dumps(value)}\n")

    loads = bool(importlib.metadata.entry_points(group=_TORCH_LOADS))
    usable = not loads and _import_all()
    write(usable)
    running: set[int] = set()
    if usable:
        for line in sys.stdin:
            verb, *values = json.loads(line)
            if verb == "start":
                pid = _fork(*values, close=replies.close)
                running.add(pid)
                write(pid)
            else:
                status = _status(values[0], kill=verb == "kill")
                if status is not None:
                    running.discard(values[0])
                write([status])
    for pid in running:
        _status(pid, kill=True)
    return 0


def _import_all() -> bool:
    """Import the checks and torch; return True if a fork can replace a new process then."""
    from lmcore_conformance.plugin_check.traces import open_devices
    from lmcore_conformance.process import child, ranks  # noqa: F401 - for the processes
    from lmcore_conformance.registry import all_checks

    all_checks()
    return can_fork() and not open_devices()


def _fork(env: dict[str, str], arguments: list[str], log: str, *, close: Callable[[], None]) -> int:
    def work() -> int:
        os.setsid()
        close()
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor, file in enumerate((null, null, errors)):
            os.dup2(file, descriptor)
        os.close(null)
        os.close(errors)
        if env.get(_THREADS) != os.environ.get(_THREADS):
            import torch

            torch.set_num_threads(int(env[_THREADS]))
        os.environ.clear()
        os.environ.update(env)
        target, values, answers, timeout = arguments
        try:
            return answer(target, values, answers, timeout)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(bool(error.code))

    return fork_child(work)


def _status(pid: int, *, kill: bool) -> int | None:
    """Return the exit status of a forked process, if it has ended or is to be killed."""
    # Not reaped before its group is killed, so that the group's number is still its own.
    if not kill and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        return None
    for send in (os.killpg, os.kill):  # the process may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
