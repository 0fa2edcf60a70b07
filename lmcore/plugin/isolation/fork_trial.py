"""Trial of plugins in copies of this process, because their code may crash in native code or hang.

Each plugin is imported and probed in a separate child process, all at the same time.  If the child
is killed, does not answer in time, or forks a process that continues in its place, this plugin is
at fault and no other.  So no plugin ends a command or changes the result of another one,
and the effects of its probe on a process (a driver's library loaded, a context created) end with
the child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lmcore.base.child_process import ending, fork_child, last_line, log_tail
from lmcore.base.signals import END_SIGNALS
from lmcore.plugin.isolation.location import crash_location

__all__ = ["Trial", "can_try", "try_each"]

Attempt = Callable[[Callable[[str], None]], Mapping[str, Any]]
"""Function that runs a plugin's code in the copy: takes a function that names the current phase,
returns JSON values."""

_FORKED = "it forked the process, and the second one continued as lmcore"
_STRAY_SECONDS = 0.5
"""Time that a process which a plugin forked has to show that it continues in the copy's place."""
_POLL_SECONDS = 0.005
_LEAST_SECONDS = 0.05
"""Least time by which a limit is extended."""


@dataclass(frozen=True)
class Trial:
    """Result of one plugin's trial.

    Attributes:
        answer: result of the attempt; empty if it did not finish.
        fault: the way in which the copy ended meanwhile; empty if it did not.
        phase: the last phase that the attempt named.
        log: end of its standard error, with Python's stack if it crashed.
        seconds: wall time of each phase that ended.
    """

    answer: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    phase: str = ""
    log: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


def can_try() -> bool:
    """Return True if this system can fork."""
    return hasattr(os, "fork")


def try_each(attempts: Mapping[str, Attempt], *, seconds: float) -> dict[str, Trial]:
    """Make each attempt in a separate copy of this process; the copies run at the same time.

    Args:
        attempts: attempts by name.
        seconds: time limit of each phase of an attempt; the copy is killed after it.

    Raises:
        OSError: The system gives not even one process.
    """
    found: dict[str, Trial] = {}
    waiting = list(attempts)
    while waiting:
        with _started({name: attempts[name] for name in waiting}, seconds) as copies:
            while running := [copy for copy in copies.values() if copy.trial is None]:
                sending = [copy for copy in running if copy.is_open]
                left = min(copy.deadline for copy in running) - time.monotonic()
                if len(sending) < len(running):  # some copy is about to end, or hangs
                    left = min(left, _POLL_SECONDS)
                ready, _, _ = select.select(sending, [], [], max(0.0, left))
                for copy in running:
                    if copy in ready:
                        copy.read()
                    elif not copy.has_failed() and time.monotonic() > copy.deadline:
                        copy.end_late()
        found |= {name: copy.trial for name, copy in copies.items() if copy.trial is not None}
        waiting = [name for name in attempts if name not in found]
    return {name: found[name] for name in attempts}


@contextlib.contextmanager
def _started(attempts: Mapping[str, Attempt], seconds: float) -> Iterator[dict[str, _Copy]]:
    """Start a copy for each attempt, or for as many as the system gives; end all of them."""
    copies: dict[str, _Copy] = {}
    try:
        for name, attempt in attempts.items():
            try:
                copies[name] = _Copy(attempt, seconds)
            except OSError:
                if not copies:
                    raise
                break
        yield copies
    finally:
        for copy in copies.values():
            copy.close()


class _Copy:
    """A copy of this process that makes one attempt.

    Attributes:
        deadline: Time at which the current phase is too late.
        is_open: False after it has closed its end of the pipe, as it does when it ends.
        trial: Result; None while the attempt runs.
    """

    def __init__(self, attempt: Attempt, seconds: float) -> None:
        self.trial: Trial | None = None
        self.is_open = True
        self._seconds, self._phase, self._took = seconds, "start", dict[str, float]()
        self._text = b""
        self._status: int | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._pipe, writing = os.pipe()
        try:
            self._pid = fork_child(lambda: _make_attempt(attempt, self._pipe, writing, self._log))
        except OSError:
            os.close(self._pipe)
            self._log.close()
            raise
        finally:
            os.close(writing)
        self._begin("start")

    def fileno(self) -> int:
        """Return the file descriptor that the messages of the copy arrive at."""
        return self._pipe

    def read(self) -> None:
        """Read new messages; the attempt is over with its answer."""
        chunk = os.read(self._pipe, 65536)
        if not chunk:
            self.is_open = False
            return
        *lines, self._text = (self._text + chunk).split(b"\n")
        for line in lines:
            if self.trial is None:
                self._take(json.loads(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if "forked" in message:
            self._phase = message["forked"]
            self._fail(_FORKED)
            return
        self._took[self._phase] = now - self._began
        if "phase" in message:
            self._begin(message["phase"])
        else:
            self.trial = Trial(answer=message["answer"], seconds=self._took)

    def _begin(self, phase: str) -> None:
        self._phase, self._began = phase, time.monotonic()
        self.deadline = self._began + self._seconds
        self._starved = _starved_seconds(self._pid)

    def has_failed(self) -> bool:
        """Return True if the copy has ended without an answer, not only closed its files."""
        if not self.is_open:
            pid, raw = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = status = os.waitstatus_to_exitcode(raw)
                self._fail(f"the process {ending(status)}")
        return self.trial is not None

    def end_late(self) -> None:
        """End the attempt at its limit; the time that the copy waited for a processor is added."""
        starved = _starved_seconds(self._pid)
        if starved - self._starved > _LEAST_SECONDS:
            self.deadline += starved - self._starved
            self._starved = starved
            return
        os.kill(self._pid, signal.SIGKILL)  # before its log is read
        self._fail(f"no answer within {self._seconds:g} s")

    def _fail(self, how: str) -> None:
        text = log_tail(self._log)
        self.trial = Trial(
            fault=how + (crash_location(text) or last_line(text)),
            phase=self._phase,
            log=text,
            seconds=self._took,
        )

    def close(self) -> None:
        """End the copy with all processes that it started, and close its files."""
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)  # it may not lead its session yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if self._status is None:
            os.waitpid(self._pid, 0)
        os.close(self._pipe)
        self._log.close()


def _starved_seconds(pid: int) -> float:
    """Return how long a process has waited for a processor; 0 if the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text("utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _make_attempt(attempt: Attempt, reading: int, writing: int, log: IO[bytes]) -> int:
    """Make the attempt in the copy, and write its messages to the pipe *writing*."""
    os.close(reading)
    os.setsid()
    own, phase = os.getpid(), "start"
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, log.fileno()), (2, log.fileno())):
        os.dup2(source, descriptor)
    faulthandler.enable(file=log.fileno())

    def send(**message: Any) -> None:
        if os.getpid() != own:
            message = {"forked": phase}
        _write(writing, json.dumps(message).encode() + b"\n")
        if os.getpid() != own:
            os._exit(0)

    def begin(name: str) -> None:
        nonlocal phase
        send(phase=name)
        phase = name

    answer = attempt(begin)
    if os.getpid() == own:
        _await_strays()
    send(answer=answer)
    return 0


def _await_strays() -> None:
    """Wait for processes that the plugin forked: one may continue in this one's place."""
    deadline = time.monotonic() + _STRAY_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_POLL_SECONDS)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
