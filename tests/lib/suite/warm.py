"""Python programs started from a process that has imported torch and lmcore already.

Importing torch takes more than a second, and most programs that tests start do little else.
`WarmPopen` and `run` take the place of `subprocess.Popen` and `subprocess.run` for commands that
begin with `sys.executable`: a server process, one for each test process, forks for each of them.
The program is a process of its own, with its own arguments, environment, folder and streams.

A command is started in the usual way if it needs something that a fork cannot give: interpreter
options besides `-P`, a `preexec_fn`, or another number of OpenMP threads than the server's.  Tests
of start-up itself (what is imported, how long it takes) use `subprocess`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "lmcore.cli.main",
    "lmcore.train.run",
)
THREADS = {"OMP_NUM_THREADS": "1"}
_LENGTH = struct.Struct("<I")
_STATUS = struct.Struct("<i")


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, for a command that begins with `sys.executable`."""

    _connection: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        # The order of the parameters is that of CPython's 3.11 to 3.13.
        close_fds, pass_fds, cwd, env, _, _, shell, *more = rest
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *options = more
        start_new_session = bool(options[5])
        variables = dict(os.environ if env is None else env)
        program = _program([os.fspath(one) for one in args], variables)
        unusual = preexec_fn is not None or shell or pass_fds or executable is not None
        if program is None or unusual or not close_fds:
            super()._execute_child(args, executable, preexec_fn, *rest)
            return
        order = {
            "program": program,
            "env": variables,
            "cwd": os.fspath(cwd) if cwd is not None else str(Path.cwd()),
            "session": start_new_session,
        }
        streams = [p2cread, c2pwrite, errwrite]
        own = [stream if stream != -1 else number for number, stream in enumerate(streams)]
        self._connection, self.pid = _server().start(order, own)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)
        seconds = 0 if wait_flags & os.WNOHANG else None
        if not select.select([self._connection], [], [], seconds)[0]:
            return 0, 0
        told = self._connection.recv(_STATUS.size)
        self._connection.close()
        status = _STATUS.unpack(told)[0] if len(told) == _STATUS.size else signal.SIGKILL
        return self.pid, status

    def _internal_poll(self, *args: Any, **more: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*args, **more)
        if self.returncode is None:
            with self._waitpid_lock:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
        return self.returncode


def run(
    command: Sequence[Any],
    *,
    input: str | bytes | None = None,  # noqa: A002 - as in `subprocess.run`
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, as `subprocess.run` does."""
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        more["stdin"] = subprocess.PIPE
    with WarmPopen(command, **more) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _program(args: list[str], env: Mapping[str, str]) -> list[str] | None:
    """Return what follows the interpreter and its options; None if a fork cannot run it."""
    if not args or args[0] != sys.executable:
        return None
    rest = args[1:]
    while rest[:1] == ["-P"]:
        rest = rest[1:]
    if not rest or (rest[0].startswith("-") and rest[0] not in {"-m", "-c"}):
        return None
    if any(env.get(name, value) != value for name, value in THREADS.items()):
        return None
    return None if env.get("PYTHONWARNINGS") else rest


class _Server:
    """The client's end of the process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        paths = [str(Path(__file__).parents[1]), *_path_variable(os.environ)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "suite.warm", str(theirs.fileno())],
            env={**inherited, **THREADS, "PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        atexit.register(self.close)

    def start(self, order: dict[str, Any], streams: list[int]) -> tuple[socket.socket, int]:
        """Start a program; returns the connection that tells its status, and its process id."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            content = json.dumps(order).encode()
            passed = array.array("i", [*streams, theirs.fileno()])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
            self._socket.sendmsg([_LENGTH.pack(len(content))], ancillary)
            self._socket.sendall(content)
        told = ours.recv(_STATUS.size)
        if len(told) != _STATUS.size:
            raise RuntimeError("the process that starts Python programs has ended")
        return ours, int(_STATUS.unpack(told)[0])

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()


_STARTED: dict[int, _Server] = {}


def _server() -> _Server:
    """Return this process's server, and start it at the first call."""
    if os.getpid() not in _STARTED:
        _STARTED[os.getpid()] = _Server()
    return _STARTED[os.getpid()]


def _path_variable(env: Mapping[str, str]) -> list[str]:
    return [one for one in env.get("PYTHONPATH", "").split(os.pathsep) if one]


# In the process that forks


def _serve(orders: socket.socket) -> None:
    """Fork for each order until the client is gone."""
    for name in PRELOADED:
        __import__(name)
    own = set(_path_variable(os.environ))
    sys.path[:] = [path for path in sys.path if path not in own]
    running: dict[int, socket.socket] = {}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    while True:
        ready = select.select([orders, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(running)
        if orders in ready and not _take(orders, running):
            return


def _report_ended(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as connection, contextlib.suppress(OSError):
                connection.sendall(_STATUS.pack(status))


def _take(orders: socket.socket, running: dict[int, socket.socket]) -> bool:
    """Fork for the next order; False if there will be none."""
    head, passed, _, _ = socket.recv_fds(orders, _LENGTH.size, 4)
    if len(head) != _LENGTH.size:
        return False
    content = b""
    while len(content) < _LENGTH.unpack(head)[0]:
        content += orders.recv(_LENGTH.unpack(head)[0] - len(content))
    *streams, told = passed
    connection = socket.socket(fileno=told)
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _become(json.loads(content), streams)
    running[pid] = connection
    for stream in streams:
        os.close(stream)
    connection.sendall(_STATUS.pack(pid))
    return True


def _become(order: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the program in this process, and end with its status."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    if order["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    kind, *args = order["program"]
    paths = _path_variable(os.environ)
    if "PYTHONSAFEPATH" not in os.environ:
        script = kind not in {"-m", "-c"}
        paths.insert(0, str(Path(kind).resolve().parent) if script else "")
    sys.path[:0] = paths
    importlib.invalidate_caches()
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    _end_with(lambda: _execute(kind, args))


def _execute(kind: str, args: list[str]) -> None:
    if kind == "-m":
        sys.argv = args
        sys.modules.pop(args[0], None)  # it may be one of those imported ahead
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *args[1:]]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(args[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [kind, *args]
        runpy.run_path(kind, run_name="__main__")


def _end_with(body: Any) -> NoReturn:
    """End as the interpreter does after *body*: threads joined, exit functions called."""
    status = 0
    try:
        body()
    except SystemExit as error:
        if isinstance(error.code, int):
            status = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        _die_interrupted()
    except BaseException:  # noqa: BLE001 - printed as the interpreter does
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def _die_interrupted() -> NoReturn:
    sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError


if __name__ == "__main__":
    from suite.warm import _serve as serve  # the module of this name, not `__main__`

    serve(socket.socket(fileno=int(sys.argv[1])))
