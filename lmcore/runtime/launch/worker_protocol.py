"""Protocol between the launcher of a run and its worker processes.

A worker ends with its launcher, and writes its error to a file, so that the launcher shows the
first error once.  Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lmcore.base.bounded_file import open_regular, read_bounded_file
from lmcore.base.child_process import exit_after
from lmcore.base.durable import write_atomically
from lmcore.base.errors import HostMemoryError, LmcoreError, OtherRankError
from lmcore.base.signals import TerminatedError, end_word

__all__ = [
    "FAILED",
    "LAUNCHED",
    "LaunchInfo",
    "Report",
    "complete_summary",
    "end_with_launcher",
    "failure_status",
    "is_lost_peer",
    "launch_info",
    "name_summary",
    "read_report",
    "report_error",
    "summary_path",
    "write_report",
]

LAUNCHED = "LMCORE_LAUNCHED"
"""Environment variable that a launcher sets for its workers."""

FAILED = "failed"
"""Key in the launcher's store with the first failed worker, as JSON: rank, what, why and hint."""

_LOST_PEER_MESSAGES = ("onnection closed by peer", "onnection reset by peer", "roken pipe")
_MAX_REPORT_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_PARENT_POLL_SECONDS = 1.0
_SUMMARY = "summary"
"""Name of the file, beside the reports, that holds the path of the run's `summary.json`."""
_COUNTS = {
    "iteration": "step",
    "consumed_samples": "consumed_samples",
    "consumed_tokens": "consumed_tokens",
    "skipped_iterations": "skipped_iterations",
}
"""Key in a row of `metrics.jsonl` by key of the summary."""


@dataclass(frozen=True)
class LaunchInfo:
    """Data from the launcher for a worker.

    Attributes:
        report_file: File for the worker's error; empty if the process is not a worker.
        secret: Secret of the store of the run, which the launcher has; in hexadecimal digits.
        store_port: Port of the store at the loopback address; 0: MASTER_PORT.
        launcher: Process id of the launcher, the parent of its workers; 0: unknown.
    """

    report_file: str = ""
    secret: str = field(default="", repr=False)
    store_port: int = 0
    launcher: int = 0

    def to_env(self) -> dict[str, str]:
        """Return the environment variable for `launch_info`."""
        return {LAUNCHED: json.dumps(asdict(self))}


def launch_info(env: Mapping[str, str]) -> LaunchInfo:
    """Return the launcher's data; the default if there is no launcher.

    A variable that was left by an earlier launcher, whose folder is removed, is ignored, and so is
    a worker's variable in a program that the worker started.
    """
    text = env.get(LAUNCHED)
    try:
        info = LaunchInfo(**json.loads(text)) if text else LaunchInfo()
        is_worker = info.launcher in {0, os.getppid()}
        return info if is_worker and Path(info.report_file).parent.is_dir() else LaunchInfo()
    except (ValueError, TypeError):
        return LaunchInfo()


@dataclass(frozen=True)
class Report:
    """Error of a worker.

    Attributes:
        at: Time of the error, from `time.time()`.
        text: Rendered error.
        status: Exit status.
        secondary: True if another worker is the cause.
    """

    at: float
    text: str
    status: int
    secondary: bool

    @classmethod
    def of(cls, error: BaseException) -> Report:
        """Describe an error that ends the process."""
        if isinstance(error, MemoryError):
            error = HostMemoryError(error)
        if isinstance(error, LmcoreError):
            secondary = isinstance(error, OtherRankError)
            return cls(time.time(), error.render(), error.exit_status, secondary)
        text = "".join(traceback.format_exception(error)).rstrip("\n")
        return cls(time.time(), text, 1, secondary=is_lost_peer(error))


def is_lost_peer(error: BaseException) -> bool:
    """Return True for torch's error of a collective whose other side has ended."""
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in _LOST_PEER_MESSAGES
    )


def failure_status(error: BaseException) -> str:
    """Return the status in `summary.json` of a run that ended with *error*."""
    if isinstance(error, LmcoreError):
        return f"failed: {error.what}"
    if isinstance(error, KeyboardInterrupt):
        return end_word(signal.SIGINT)
    if isinstance(error, TerminatedError):
        return end_word(error.number)
    return f"failed: {type(error).__name__}: {error}"


def report_error(error: BaseException, env: Mapping[str, str]) -> Report:
    """Write this worker's error to its report file, and return it."""
    report = Report.of(error)
    write_report(report, env)
    return report


def write_report(report: Report, env: Mapping[str, str]) -> None:
    """Write a report to this worker's report file."""
    write_atomically(Path(launch_info(env).report_file), json.dumps(asdict(report)).encode())


def name_summary(summary: Path, env: Mapping[str, str]) -> None:
    """Name the file with the status of the run to the launcher, if there is one.

    The first failure may be another rank's, which only the launcher sees, and rank 0 may be killed
    or stopped: `complete_summary`.
    """
    path = launch_info(env).report_file
    if path:
        Path(path).with_name(_SUMMARY).write_text(str(summary.absolute()), "utf-8")


def summary_path(folder: Path) -> Path | None:
    """Return the path that `name_summary` named; None if training had not begun.

    Args:
        folder: Folder of the workers' report files.
    """
    try:
        return Path((folder / _SUMMARY).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def complete_summary(folder: Path, status: str, *, replace: bool = False) -> None:
    """Write the summary of a run whose rank 0 was killed or stopped before it did.

    Nothing is written if training had not begun.

    Args:
        folder: Folder of the workers' report files.
        status: Status of the run.
        replace: True to replace the failure in a summary that rank 0 did write, since another rank
            failed first.
    """
    summary = summary_path(folder)
    if summary is None:
        return
    try:
        content = json.loads(read_bounded_file(summary, _MAX_REPORT_BYTES))
        if not replace or not str(content["status"]).startswith("failed: "):
            return
    except FileNotFoundError:
        content = {"status": status, **_last_counts(summary.with_name("metrics.jsonl"))}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # another program's file
        return
    content["status"] = status
    with contextlib.suppress(OSError):
        write_atomically(summary, (json.dumps(content, indent=2) + "\n").encode())


def _last_counts(metrics: Path) -> dict[str, int]:
    """Return the counts in the last row of `metrics.jsonl`, with their names in a summary."""
    with contextlib.suppress(OSError), os.fdopen(open_regular(metrics), "rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _MAX_REPORT_BYTES))
        for line in reversed(stream.read(_MAX_REPORT_BYTES).splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # torn
                row = json.loads(line)
                return {name: row[key] for name, key in _COUNTS.items()}
    return {}


def read_report(path: Path) -> Report | None:
    """Return a worker's report; None if it wrote none."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        return Report(**json.loads(stream.read(_MAX_REPORT_BYTES)))
    return None


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Make this worker end when its launcher ends: killed by Linux, or by a thread elsewhere.

    Standard input and other files of the worker are left alone.
    """
    info = launch_info(env)
    if not (info.report_file and info.launcher):
        return
    if not _die_with_parent():
        exit_after(lambda: _wait_for_other_parent(info.launcher))
    elif os.getppid() != info.launcher:  # it ended before
        os._exit(1)


def _die_with_parent() -> bool:
    """Have Linux send SIGKILL when the parent process ends; return False if it cannot."""
    import ctypes  # takes 5 ms

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0


def _wait_for_other_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
