"""Say in words how a process ended that ran a plugin's code."""

from __future__ import annotations

import re
import signal
from pathlib import Path

__all__ = ["crash_place", "ending", "last_line", "signal_name"]


def signal_name(number: int) -> str:
    """Return a signal's name, "SIGSEGV"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(status: int) -> str:
    """Return how a process ended, from its exit status; a signal's is negative."""
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def crash_place(log: str) -> str:
    """Return where a process was, from the stack that `faulthandler` wrote; empty without one."""
    frame = r'\(most recent call first\):\n  File "([^"]+)", line (\d+) in (\S+)'
    found = re.findall(f"Current thread [^\n]*{frame}", log) or re.findall(frame, log)
    if not found:
        return ""
    file, line, function = found[-1]  # the main thread stands last
    return f"; it was in `{function}` ({Path(file).name}, line {line})"


def last_line(log: str) -> str:
    """Return the last line that a process wrote; empty where it wrote nothing."""
    lines = log.strip().splitlines()
    return f"; last line: {lines[-1].strip()}" if lines else ""
