"""Python programs started from a process that has imported torch and lmcore already.

Importing torch takes more than a second, and most programs that tests start do little else.
`WarmPopen` and `run` take the place of `subprocess.Popen` and `subprocess.run` for commands that
begin with `sys.executable`: a server process, one for each test process, forks for each of them.
The program is a separate process, with its own arguments, environment, folder and streams.

A launcher of several processes, as `lmcore train` is, forks in its turn: nothing has been done with
the torch that it finds imported.

A command is started in the usual way if it needs something that a fork cannot give: interpreter
options besides `-P`, a `preexec_fn`, other variables that count at the start (`PYTHON*`, `LD_*`) or
another number of OpenMP threads than the server's.  Tests of start-up itself (what is imported, how
long it takes) use `subprocess`.

The program becomes a child of the process that asked for it, as any that it starts: it can be
waited for, and its end is reported in the same way.  Linux gives an orphan to the nearest
ancestor that adopts orphans (`PR_SET_CHILD_SUBREAPER`), so the server makes it one.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from suite.trials import HOMES, remember_trials, try_ahead

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
AT_START = ("PYTHON", "LD_", "MALLOC_")
"""Prefixes of variables that the interpreter, the linker or the allocator reads at start-up."""
ANY_TIME = {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
"""Variables among them that a fork can follow."""
_GLOO_NOTICE = r"^(?:\[rank \d+\] )?\[Gloo\] Rank \d+ is connected to .*\n"
"""Line that gloo prints for each group in older versions of torch."""
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_PR_SET_CHILD_SUBREAPER = 36
_STARTING = threading.Lock()


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, for a command that begins with `sys.executable`.

    Its output is without the lines that gloo prints in older versions of torch.
    """

    def communicate(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Write input and read output to its end, as `subprocess.Popen.communicate` does."""
        out, err = super().communicate(*args, **options)
        if isinstance(out, str):
            out = re.sub(_GLOO_NOTICE, "", out, flags=re.MULTILINE)
        return out, err

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        # The order of the parameters is that of CPython's 3.11 to 3.13.
        close_fds, pass_fds, cwd, env, _, _, shell, *more = rest
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *options = more
        _, gid, gids, uid, umask, start_new_session, process_group = options
        variables = {
            os.fsdecode(name): os.fsdecode(value)
            for name, value in (os.environ if env is None else env).items()
        }
        folder = os.fsdecode(cwd) if cwd is not None else str(Path.cwd())
        unusual = [preexec_fn, executable, gid, gids, uid] != [None] * 5
        unusual = unusual or (umask, process_group) != (-1, -1) or shell or pass_fds
        program = None if unusual or not close_fds else _program(args, variables)
        if program is None or not Path(folder).is_dir():
            super()._execute_child(args, executable, preexec_fn, *rest)
            return
        order = {
            **program,
            "env": variables,
            "cwd": folder,
            "session": bool(start_new_session),
        }
        streams = [p2cread, c2pwrite, errwrite]
        own = [stream if stream != -1 else number for number, stream in enumerate(streams)]
        with _STARTING:
            self.pid = _server().start(order, own)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def preload(*modules: str) -> None:
    """Have programs that start later find more modules imported.

    They must be modules that every program of these tests can find, and that start no threads.
    """
    _server().preload(modules)


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


SUBPROCESS = types.SimpleNamespace(**{**vars(subprocess), "Popen": WarmPopen, "run": run})
"""Replacement of `subprocess` in a module whose processes a test starts warm."""


def _program(args: Any, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what of an order is in the command; None if a fork cannot run it."""
    if sys.platform != "linux" or isinstance(args, (str, bytes, os.PathLike)):
        return None
    arguments = [os.fsdecode(arg) for arg in args]
    if not arguments or arguments[0] != sys.executable:
        return None
    options = arguments[1:]
    while options[:1] == ["-P"]:
        options = options[1:]
    if not (options and options[0].endswith(".py")) and not (
        len(options) > 1 and options[0] in {"-m", "-c"}
    ):
        return None
    if any(env.get(name, value) != value for name, value in THREADS.items()):
        return None
    if _read_at_start(env) != _read_at_start(_server().env):
        return None
    safe = len(arguments) - len(options) > 1 or bool(env.get("PYTHONSAFEPATH"))
    return {"words": arguments, "program": options, "safe": safe}


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter when a process starts, and cannot be changed in it later."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(AT_START) and name not in ANY_TIME
    }


class _Server:
    """The client's end of the process that forks."""

    def __init__(self) -> None:
        self._socket, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        paths = [str(Path(__file__).parents[1]), *_path_variable(os.environ)]
        self.env = {**os.environ, **THREADS, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "suite.warm", str(peer.fileno()), *HOMES],
            env=self.env,
            pass_fds=[peer.fileno()],
            stdin=subprocess.DEVNULL,
        )
        peer.close()
        atexit.register(self.close)

    def start(self, order: dict[str, Any], streams: list[int]) -> int:
        """Start a program as a child of this process, and return its process id."""
        content = json.dumps(order).encode()
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
        with _adoption():
            self._socket.sendmsg([_LENGTH.pack(len(content))], passed)
            self._socket.sendall(content)
            reply = self._socket.recv(_PID.size)
        if len(reply) != _PID.size:
            raise RuntimeError("the process that starts Python programs has ended")
        return int(_PID.unpack(reply)[0])

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules, and wait until that is done."""
        content = json.dumps({"modules": modules}).encode()
        self._socket.sendall(_LENGTH.pack(len(content)) + content)
        if len(self._socket.recv(_PID.size)) != _PID.size:
            raise RuntimeError("the process that starts Python programs has ended")

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


@contextlib.contextmanager
def _adoption() -> Iterator[None]:
    """Become the parent of orphans among the processes below this one, for a moment."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _path_variable(env: Mapping[str, str]) -> list[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]


# In the process that forks


def check_open(descriptor: int) -> None:
    """Raise the error of `os.fsync` if the file is not open; do not wait for the disk."""
    os.fstat(descriptor)


def load_cpu_extension() -> None:
    """Load the extension with CPU kernels whose library replaces torch's, if one is installed.

    Otherwise a run's numbers would depend on what ran before in its process, to the last bit.
    """
    from lmcore_cpu import ipex

    if ipex.misfit() is None:
        ipex.load_operators()


def _serve(orders: socket.socket) -> None:
    """Fork for each order until the client is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client
    _import(PRELOADED)
    load_cpu_extension()
    os.fsync = check_open
    own = _path_variable(os.environ)
    sys.path[:] = paths = [path for path in sys.path if path not in own]
    while True:
        head, streams, _, _ = socket.recv_fds(orders, _LENGTH.size, 3)
        if len(head) != _LENGTH.size:
            return
        content = b""
        while len(content) < _LENGTH.unpack(head)[0]:
            content += orders.recv(_LENGTH.unpack(head)[0] - len(content))
        order = json.loads(content)
        if "modules" in order:
            sys.path[:] = [*own, *paths]
            _import(order["modules"])
            sys.path[:] = paths
            orders.sendall(_PID.pack(os.getpid()))
            continue
        orders.sendall(_PID.pack(_fork_an_orphan(order, streams)))
        for stream in streams:
            os.close(stream)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        __import__(name)
    gc.collect()
    gc.freeze()  # no collection in a fork touches, and so copies, what it shares with this process


def _fork_an_orphan(order: dict[str, Any], streams: list[int]) -> int:
    """Start a program whose parent has ended when this returns; returns its process id."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.write(writing, _PID.pack(pid))
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.0005)
        _become(order, streams)
    os.waitpid(between, 0)
    reply = os.read(reading, _PID.size)
    os.close(reading)
    os.close(writing)
    return int(_PID.unpack(reply)[0])


def _become(order: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the program in this process, and end with its status."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    if order["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    kind, *args = order["program"]
    paths = _path_variable(os.environ)
    if not order["safe"]:
        here = {"-m": order["cwd"], "-c": ""}
        paths.insert(0, here[kind] if kind in here else str(Path(kind).resolve().parent))
    sys.path[:0] = paths
    sys.orig_argv[:] = order["words"]
    importlib.invalidate_caches()
    _open_streams()
    if "numpy" in sys.modules:  # else all programs would draw the same numbers
        sys.modules["numpy"].random.seed()
    _let_launchers_fork()
    _end_with(lambda: _execute(kind, args))


def _open_streams() -> None:
    """Open standard input, output and error as the interpreter does at its start."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        raw = io.FileIO(number, "rb" if number == 0 else "wb", closefd=False)
        buffer: Any = raw
        if number == 0 or not unbuffered:
            buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        new = io.TextIOWrapper(
            buffer,
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=not unbuffered and (number == 2 or raw.isatty()),
            write_through=unbuffered and number > 0,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _let_launchers_fork() -> None:
    """Tell the launcher, which refuses to fork where torch is imported, that this one is unused."""
    from lmcore.runtime.launch import launcher as launch

    def can_fork_workers(load: Any) -> bool:
        if not launch.can_fork():
            return False
        load()
        return launch.can_fork()

    assert hasattr(launch, "_can_fork_workers")  # else the patch would be without effect
    launch._can_fork_workers = can_fork_workers


def _execute(kind: str, args: list[str]) -> None:
    if kind == "-m":
        sys.argv = args
        sys.modules.pop(args[0], None)  # it may be one of those imported ahead
        if args[0] == "pytest":  # which rewrites the modules of its plugins when they are imported
            for name in [name for name in sys.modules if name.startswith("lmcore_conformance")]:
                del sys.modules[name]
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *args[1:]]
        _execute_main(args[0], "<string>")
    else:
        sys.argv = [kind, *args]
        path = Path(kind).absolute()
        _execute_main(path.read_bytes(), str(path), __file__=str(path))


def _execute_main(source: str | bytes, name: str, **variables: Any) -> None:
    """Execute a text as the module `__main__`."""
    main = types.ModuleType("__main__")
    vars(main).update(variables)
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), vars(main))


def _end_with(body: Any) -> NoReturn:
    """End as the interpreter does after *body*: threads joined, exit functions called."""
    status = 0
    interrupted = False
    try:
        body()
    except SystemExit as error:
        if isinstance(error.code, int):
            status = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException as error:  # noqa: BLE001 - printed as the interpreter does
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        interrupted = isinstance(error, KeyboardInterrupt)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        status = 120
        print(f"Exception ignored while flushing sys.stdout: {error!r}", file=sys.stderr)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    from suite.warm import _serve as serve  # the module of this name, not `__main__`

    remember_trials(sys.argv[2:])
    try_ahead()
    serve(socket.socket(fileno=int(sys.argv[1])))
