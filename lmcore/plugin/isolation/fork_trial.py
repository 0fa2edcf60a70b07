"""Trial of plugins in a copy of this process, because their code may crash in native code or hang.

The child process imports and probes the plugins one after the other and reports each result.  If it
is killed or does not answer in time, the plugin at that point is at fault, and another child
continues with the plugins after it.  So no plugin ends a command, and the effects of its probe on a
process (a driver's library loaded, a context created) end with the child.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from lmcore.child_process import ending, fork_child, last_line, log_tail
from lmcore.plugin.isolation.location import crash_location
from lmcore.signals import END_SIGNALS

__all__ = ["Trial", "can_try", "try_each"]

Attempt = Callable[[Callable[[str], None]], Mapping[str, Any]]
"""Function that runs a plugin's code in the copy: takes a function that names the current phase,
returns JSON values."""


@dataclass(frozen=True)
class Trial:
    """Result of one plugin's trial.

    Attributes:
        answer: result of the attempt; empty if it did not finish.
        fault: the way in which the copy ended meanwhile; empty if it did not.
        phase: the last phase that the attempt named.
        log: end of its standard error, with Python's stack if it crashed.
    """

    answer: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    phase: str = ""
    log: str = ""


def can_try() -> bool:
    """Return True if this system can fork."""
    return hasattr(os, "fork")


def try_each(attempts: Mapping[str, Attempt], *, seconds: float) -> dict[str, Trial]:
    """Make each attempt in a copy of this process.

    Args:
        attempts: attempts by name, in their order.
        seconds: time limit of each phase of an attempt; the copy is killed after it.
    """
    found: dict[str, Trial] = {}
    rest = list(attempts)
    while rest:
        found |= _one_copy({name: attempts[name] for name in rest}, seconds)
        rest = [name for name in rest if name not in found]
    return found


def _one_copy(attempts: Mapping[str, Attempt], seconds: float) -> dict[str, Trial]:
    """Return the trials up to the first that ended the copy, or all of them."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as log:
        child = fork_child(lambda: _make_attempts(attempts, reading, writing, log))
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            found, at, phase, late = _listen(pipe, list(attempts), seconds)
        if late:
            os.kill(child, signal.SIGKILL)
        _, raw = os.waitpid(child, 0)
        if len(found) < len(attempts):
            text = log_tail(log)
            how = f"no answer within {seconds:g} s" if late else ""
            how = how or f"the process {ending(os.waitstatus_to_exitcode(raw))}"
            found[at] = Trial(
                fault=how + (crash_location(text) or last_line(text)), phase=phase, log=text
            )
    return found


def _listen(
    pipe: IO[bytes], names: Sequence[str], seconds: float
) -> tuple[dict[str, Trial], str, str, bool]:
    """Return the trials that ended well, then the name and phase it was at, and whether it hung."""
    found: dict[str, Trial] = {}
    phase, text = "start", b""
    deadline = time.monotonic() + seconds
    while len(found) < len(names):
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return found, names[len(found)], phase, True
        chunk = pipe.read(65536)
        if not chunk:
            return found, names[len(found)], phase, False
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "phase" in message:
                phase, deadline = message["phase"], time.monotonic() + seconds
            else:
                found[names[len(found)]] = Trial(answer=message["answer"])
                phase, deadline = "start", time.monotonic() + seconds
    return found, "", "", False


def _make_attempts(
    attempts: Mapping[str, Attempt], reading: int, writing: int, log: IO[bytes]
) -> int:
    """Make the attempts in the copy, and write their answers to the pipe *writing*."""
    os.close(reading)
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, log.fileno()), (2, log.fileno())):
        os.dup2(source, descriptor)
    faulthandler.enable(file=log.fileno())

    def send(**message: Any) -> None:
        _write(writing, json.dumps(message).encode() + b"\n")

    for attempt in attempts.values():
        send(answer=attempt(lambda phase: send(phase=phase)))
    return 0


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
