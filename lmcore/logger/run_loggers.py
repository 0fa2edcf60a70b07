"""`RunLoggers`: the loggers of one run; none can stop it or hold it up.

Only rank 0 has them.  A logger that fails is named in one warning and left alone.  Loggers of
servers work on a thread each: steps wait for none, and the end of a run only for a limited time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmcore.base.durable import write_atomically
from lmcore.base.errors import LmcoreError, counted
from lmcore.base.threads import start_optional
from lmcore.model.run_logger import LoggedRun, OpenLogger, RunLogger, StepMetrics, run_loggers

__all__ = ["IDS_NAME", "RunLoggers"]

IDS_NAME = "loggers.json"
"""File of the run directory with the identity of the run at each logger."""

_CLOSE_SECONDS = 60.0
"""Longest time that the end of a run waits for a logger."""
_MOST_WAITING = 100_000
_LARGEST_IDS = 1 << 16

_log = logging.getLogger(__name__)


class RunLoggers:
    """The open loggers of a run."""

    def __init__(
        self,
        run: LoggedRun,
        *,
        keep_ids: bool = True,
        records: Iterable[RunLogger] | None = None,
    ) -> None:
        """Open the loggers that the run's settings ask for.

        Args:
            run: The run.
            keep_ids: True to keep each logger's identity of the run in the run directory, by which
                a continued run is logged as the same one.
            records: Loggers to choose from; None: all that are registered.
        """
        ids = run.directory / IDS_NAME if keep_ids else None
        # A run that begins at step 0 is another one, also in the directory of one that failed.
        known = _read_ids(ids) if ids is not None and run.step else {}
        keep = _Ids(ids, known).keep if ids is not None else lambda _name, _id: None
        self._loggers = [
            _Guarded(one, replace(run, run_id=known.get(one.name)), keep)
            for one in (run_loggers().values() if records is None else records)
            if _is_wanted(one, run.config)
        ]
        for one in self._loggers:
            one.start()

    def __len__(self) -> int:
        return len(self._loggers)

    def log(self, metrics: StepMetrics) -> None:
        """Log the numbers of a step; numbers that are not finite are left out."""
        values, by_samples = _finite(metrics.values), _finite(metrics.by_samples)
        finite = replace(metrics, values=values, by_samples=by_samples)
        self._call(lambda logger: logger.log(finite))

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text by its name."""
        self._call(lambda logger: logger.text(name, text, step))

    def directory_lost(self) -> None:
        """Let the loggers open files again that were in the run directory."""
        self._call(lambda logger: logger.directory_lost())

    def close(self, status: str) -> dict[str, dict[str, float]]:
        """Close all loggers; return the numbers of each that has some.  A second call does nothing.

        Args:
            status: "completed", or the reason or failure that ended the run.
        """
        closing, self._loggers = self._loggers, []
        for one in closing:
            one.begin_close(status)
        numbers = {one.record.name: one.end_close() for one in closing}
        return {name: dict(values) for name, values in numbers.items() if values}

    def _call(self, work: Callable[[OpenLogger], object]) -> None:
        for one in self._loggers:
            one.call(work)


class _Guarded:
    """One logger, open or failed, on another thread if it works in the background."""

    def __init__(self, record: RunLogger, run: LoggedRun, keep: Callable[[str, str], None]) -> None:
        self.record = record
        self._run, self._keep = run, keep
        self._logger: OpenLogger | None = None
        self._numbers: Mapping[str, float] = {}
        self._failed = self._opened = False
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Open the logger, on its thread if it has one."""
        if self.record.in_background:
            name = f"lmcore-logger-{self.record.name}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            if start_optional(thread, without=f"nothing is logged to {self.record.title}"):
                self._thread = thread
            else:
                self._failed = True
        self._do(self._open)

    def call(self, work: Callable[[OpenLogger], object]) -> None:
        """Let the logger do something, now or after what it was given before."""
        self._do(lambda: work(self._logger) if self._logger is not None else None)

    def begin_close(self, status: str) -> None:
        """Close the logger after what it was given before."""
        self._do(lambda: self._close(status))
        if self._thread is not None and not self._failed:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)

    def end_close(self) -> Mapping[str, float]:
        """Wait until the logger is closed; return its numbers."""
        if self._thread is not None and not self._failed:
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                self._failed = True
                waited = counted(int(_CLOSE_SECONDS), "second")
                self._warn(f"it did not end within {waited}; its last rows may be missing")
                return {}
        return self._numbers

    def _do(self, work: Callable[[], object]) -> None:
        if self._failed:
            return
        if self._thread is None:
            self._guarded(work)
            return
        try:
            self._queue.put_nowait(lambda: self._guarded(work))
        except queue.Full:
            self._failed = True
            self._warn(f"it is {counted(_MOST_WAITING, 'row')} behind")

    def _work(self) -> None:
        """Do what is queued, until the end; the thread's function."""
        while (work := self._queue.get()) is not None:
            work()

    def _guarded(self, work: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            work()
        except (Exception, SystemExit) as cause:  # noqa: BLE001 - of any package
            self._failed = True
            self._warn(_in_words(cause))
            logger, self._logger = self._logger, None
            if logger is not None:
                with contextlib.suppress(Exception, SystemExit):
                    logger.close("failed")
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)

    def _open(self) -> None:
        logger = self.record.load()(self._run)
        if not isinstance(logger, OpenLogger):
            raise TypeError(f"`{self.record.open}` returned {logger!r:.100}, not an `OpenLogger`")
        self._logger, self._opened = logger, True
        if logger.run_id is not None and logger.run_id != self._run.run_id:
            self._keep(self.record.name, str(logger.run_id))

    def _close(self, status: str) -> None:
        if self._logger is not None:
            numbers: object = self._logger.close(status)
            self._logger = None
            if not isinstance(numbers, Mapping):
                raise TypeError(f"`close` returned {numbers!r:.100}, not a mapping of numbers")
            self._numbers = _finite(numbers)

    def _warn(self, why: str) -> None:
        more = " more" if self._opened else ""
        _log.warning("nothing%s is logged to %s: %s", more, self.record.title, why)


class _Ids:
    """The file with the identity of the run at each logger."""

    def __init__(self, path: Path, known: Mapping[str, str]) -> None:
        self._path, self._known, self._lock = path, dict(known), threading.Lock()

    def keep(self, name: str, run_id: str) -> None:
        """Keep the identity at one logger."""
        with self._lock:
            self._known[name] = run_id
            write_atomically(self._path, (json.dumps(self._known, indent=2) + "\n").encode())


def _read_ids(path: Path) -> dict[str, str]:
    """Return the identities of an earlier session; empty if there are none that can be read."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LARGEST_IDS))
    except (OSError, ValueError, RecursionError):
        return {}
    pairs: Iterable[tuple[Any, Any]] = found.items() if isinstance(found, dict) else ()
    return {str(name): one for name, one in pairs if isinstance(one, str)}


def _is_wanted(one: RunLogger, config: Any) -> bool:
    try:
        return bool(one.wanted(config))
    except Exception as cause:  # noqa: BLE001 - of any plugin
        _log.warning("nothing is logged to %s: %s", one.title, _in_words(cause))
        return False


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(one) for name, one in values.items() if math.isfinite(one)}


def _in_words(cause: BaseException) -> str:
    """Return a failure in one line, with its hint."""
    if isinstance(cause, LmcoreError):
        parts = (cause.what, cause.why, cause.hint)
        return "; ".join(part for part in parts if part)
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text}"[:500] if text else type(cause).__name__
