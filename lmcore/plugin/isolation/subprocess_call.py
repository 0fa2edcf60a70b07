"""Call a function in a separate process, with a time limit.

Code of plugins and drivers may crash in native code or hang.  Called here, that becomes an
`Outcome` with the reason, and the caller continues.

    outcome = call_isolated("package.module:function", "argument", timeout=60.0)
    outcome.value if outcome.complete else outcome.fault

Arguments and results are JSON values.  The values that a function yields before a crash
are kept.  Torch-free.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmcore.base.child_process import ending, kill_group, last_line, log_tail
from lmcore.base.errors import LmcoreError
from lmcore.plugin.isolation.location import crash_location

__all__ = [
    "HUNG",
    "Call",
    "Outcome",
    "Running",
    "answer",
    "call_isolated",
    "call_together",
    "in_one_line",
    "start_program",
]

_POLL_SECONDS = 0.02

HUNG = "no answer in time"
"""Beginning of the fault of a process that ended itself because it hung."""

_WATCHDOG = re.compile(
    r"^Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!\n"
    r"((Current thread|Thread|Stack) ?[^\n]*\(most recent call first\):\n(  [^\n]*\n)*\n?)+\Z",
    re.MULTILINE,
)
"""Stacks that `faulthandler` writes last when it ends a process that takes too long."""

_BOOTSTRAP = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = [*given, *(path for path in sys.path if path not in given)]
from lmcore.plugin.isolation.subprocess_call import answer
raise SystemExit(answer(*sys.argv[2:]))
"""
"""Program of the child: it searches modules in the same folders as its parent."""


@dataclass(frozen=True)
class Call:
    """A function to call in a separate process.

    Attributes:
        target: "package.module:function".
        arguments: JSON values.
        env: The whole environment; default: this process's.
    """

    target: str
    arguments: tuple[Any, ...] = ()
    env: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a call.

    Attributes:
        values: the values that the function yielded, or its single return value.
        fault: the unexpected end of the process, in one line; empty if there was none.
        log: end of its standard error.
        seconds: duration.
    """

    values: tuple[Any, ...]
    fault: str
    log: str
    seconds: float

    @property
    def complete(self) -> bool:
        """True if the function and its process ended as they should."""
        return not self.fault

    @property
    def value(self) -> Any:
        """The result of a function that does not yield; None if it did not finish."""
        return self.values[-1] if self.values else None


class Running(Protocol):
    """A process that makes a call."""

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""

    def has_ended(self) -> bool:
        """Return True if the process has ended; its children end with it."""

    def kill(self) -> None:
        """End the process and its children; nothing happens when that was done already."""


Start = Callable[[Mapping[str, str] | None, Sequence[str], Path], Running]
"""Starts a process with an environment, the arguments of `answer`, and the file that its standard
error goes to."""


class _Program:
    """A new process of the interpreter."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def has_ended(self) -> bool:
        if self.status is not None:
            return True
        # Not reaped before its group is killed, so that the group's number is still its own.
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if status is None:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        if self.status is None:
            kill_group(self._process)


def start_program(env: Mapping[str, str] | None, arguments: Sequence[str], log: Path) -> Running:
    """Start a new interpreter that makes a call; see `Start`."""
    command = [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path), *arguments]
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    return _Program(process)


def call_isolated(
    target: str, *arguments: Any, timeout: float, env: Mapping[str, str] | None = None
) -> Outcome:
    """Call "package.module:function" with JSON *arguments* in a separate process.

    Args:
        target: The function.
        *arguments: JSON values.
        timeout: Seconds until the process and its children are killed.
        env: The whole environment; default: this process's.
    """
    return call_together([Call(target, arguments, env)], timeout=timeout)[0]


def call_together(
    calls: Sequence[Call], *, timeout: float, grace: float = 5.0, start: Start = start_program
) -> tuple[Outcome, ...]:
    """Make several calls at the same time, each in a separate process.

    Args:
        calls: The functions.
        timeout: Seconds until all that still run are killed.
        grace: Seconds that other calls get after one has failed: they may be waiting for it.
        start: Starts a process; default: as a new interpreter.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lmcore-isolated-") as folder,
        _started(calls, Path(folder), timeout, start) as children,
    ):
        begin = time.monotonic()
        deadline = begin + timeout
        while running := [child for child in children if child.seconds is None]:
            now = time.monotonic()
            for child in running:
                if child.process.has_ended():
                    child.seconds = now - begin
                    if child.process.status != 0:
                        deadline = min(deadline, now + grace)
            if now > deadline:
                break
            time.sleep(_POLL_SECONDS)
        took = time.monotonic() - begin
        return tuple(child.outcome(took, timeout) for child in children)


class _Child:
    """A started process and the files that it writes."""

    def __init__(self, call: Call, folder: Path, timeout: float, start: Start) -> None:
        self.answers = folder / "answers.jsonl"
        self.log = folder / "stderr"
        self.seconds: float | None = None
        arguments = (call.target, json.dumps(call.arguments), str(self.answers), str(timeout))
        self.process = start(call.env, arguments, self.log)

    def outcome(self, took: float, timeout: float) -> Outcome:
        """Return how the call ended; one that still runs is killed."""
        stopped = self.seconds is None
        self.process.kill()
        lines = list(_lines(self.answers))
        with self.log.open("rb") as file:
            log = log_tail(file)
        return Outcome(
            values=tuple(line["value"] for line in lines if "value" in line),
            fault=self._fault(lines, log, took, timeout if stopped else None),
            log=log,
            seconds=took if self.seconds is None else self.seconds,
        )

    def _fault(
        self, lines: Sequence[Mapping[str, Any]], log: str, took: float, timeout: float | None
    ) -> str:
        raised = next((line["raised"] for line in lines if "raised" in line), None)
        if raised is not None:
            return str(raised)
        done = any("done" in line for line in lines)
        after = " after it had answered" if done else ""
        if timeout is not None:
            limit = f"no answer within {timeout:g} s" if took >= timeout else "no answer"
            return f"{limit}{after}; stopped{crash_location(log)}"
        status = self.process.status
        assert status is not None
        if status == 1 and _WATCHDOG.search(log):
            return f"{HUNG}{after}; stopped{crash_location(log)}"
        if done and status == 0:
            return ""
        return f"the process {ending(status)}{after}{crash_location(log) or last_line(log)}"


@contextlib.contextmanager
def _started(
    calls: Sequence[Call], folder: Path, timeout: float, start: Start
) -> Iterator[list[_Child]]:
    """Start the calls; end all of their processes when the block ends, also by an exception."""
    children: list[_Child] = []
    try:
        for number, call in enumerate(calls):
            own = folder / str(number)
            own.mkdir()
            children.append(_Child(call, own, timeout, start))
        yield children
    finally:
        for child in children:
            child.process.kill()


def _lines(answers: Path) -> Iterator[dict[str, Any]]:
    if not answers.is_file():
        return
    for line in answers.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # cut off where the process was killed
            yield json.loads(line)


def answer(target: str, arguments: str, answers: str, timeout: str) -> int:
    """Call *target* in this process, the child, and write its results to the file *answers*."""
    import faulthandler

    _end_with_parent()
    faulthandler.enable()
    # Before it is killed it writes its stack: early enough for one that was slow to start.
    faulthandler.dump_traceback_later(max(0.5 * float(timeout), float(timeout) - 5.0))
    with open(answers, "a", encoding="utf-8", buffering=1) as file:  # noqa: PTH123 - kept open
        try:
            for value in _call(target, json.loads(arguments)):
                print(json.dumps({"value": value}), file=file)
        except Exception as error:  # noqa: BLE001 - the caller decides what it means
            import traceback

            traceback.print_exc()
            print(json.dumps({"raised": in_one_line(error)}), file=file)
            return 1
        print(json.dumps({"done": True}), file=file)
    faulthandler.cancel_dump_traceback_later()
    return 0


def _end_with_parent() -> None:
    """Let this process be killed when its parent ends, also if that was killed; on Linux only."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: signal that a process gets when its parent ends."""


def _call(target: str, arguments: Sequence[Any]) -> Iterable[Any]:
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)(*arguments)
    if isinstance(found, Iterator):
        return found
    return [found]


def in_one_line(error: Exception) -> str:
    """Return an exception in one line; for an `LmcoreError`, its problem and cause."""
    if isinstance(error, LmcoreError):
        lines = [line.strip() for line in (error.why or "").splitlines()]
        why = "; ".join(line for line in lines if line)
        return f"{error.what}: {why}" if why else error.what
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
