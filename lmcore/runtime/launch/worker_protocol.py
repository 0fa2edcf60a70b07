"""What a process of a run knows from `lmcore` having started it, and how it tells how it ended.

The launcher (`lmcore.runtime.launch.launcher`) and its workers share a small protocol: the worker's
standard input ends when the launcher does, and an error goes to a file, so that the launcher can
show the first one, once.  Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lmcore.child_process import exit_after
from lmcore.durable import write_atomically
from lmcore.errors import LmcoreError, OtherRankError

__all__ = ["LAUNCHED", "Launched", "Report", "end_with_launcher", "launched", "report_of", "tell"]

LAUNCHED = "LMCORE_LAUNCHED"
"""Environment variable that a launcher sets for its workers."""

_MAX_REPORT_BYTES = 1 << 20


@dataclass(frozen=True)
class Launched:
    """What the launcher says to a worker.

    Attributes:
        report_file: Where the worker tells why it failed; empty when nobody launched it.
        listening_fd: On rank 0, the open socket where the processes find each other.
    """

    report_file: str = ""
    listening_fd: int | None = None

    def to_env(self) -> dict[str, str]:
        """Return the variable from which `launched` reads it."""
        return {LAUNCHED: json.dumps(asdict(self))}


def launched(env: Mapping[str, str]) -> Launched:
    """Return what the launcher said; the default where there is none."""
    text = env.get(LAUNCHED)
    return Launched(**json.loads(text)) if text else Launched()


@dataclass(frozen=True)
class Report:
    """Why a worker failed.

    Attributes:
        at: `time.time()` of it.
        text: What to show.
        status: Exit status.
        secondary: Whether another worker is the cause.
    """

    at: float
    text: str
    status: int
    secondary: bool

    @classmethod
    def of(cls, error: BaseException) -> Report:
        """Describe an error that ends the process."""
        if isinstance(error, LmcoreError):
            secondary = isinstance(error, OtherRankError)
            return cls(time.time(), error.render(), error.exit_status, secondary)
        text = "".join(traceback.format_exception(error)).rstrip("\n")
        return cls(time.time(), text, 1, secondary=False)


def tell(error: BaseException, env: Mapping[str, str]) -> Report:
    """Write why this worker fails where its launcher reads it."""
    path = launched(env).report_file
    report = Report.of(error)
    write_atomically(Path(path), json.dumps(asdict(report)).encode())
    return report


def report_of(path: Path) -> Report | None:
    """Return what a worker wrote to its *path*; None where it said nothing."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        return Report(**json.loads(stream.read(_MAX_REPORT_BYTES)))
    return None


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Have this worker end when its launcher does, however that ends."""
    if not launched(env).report_file:
        return

    def read_until_closed() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass

    exit_after(read_until_closed)
