"""Processes of `device_suite.py`: each within what is left of the time, its output kept.

Compilers' caches are empty when a suite begins and are shared by all of its processes, so that the
first run of a model is a cold start, and the next a warm one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

__all__ = ["Case", "Runner", "Suite"]

_SHOWN = 300
"""Characters of a result that are printed."""

_TOO_LITTLE = 5.0
"""Seconds in which nothing is begun any more."""


@dataclass(frozen=True, eq=False)
class Case:
    """A row of the speed table.

    Attributes:
        model: A preset, or "tiny" and "tiny-llama" for a trial.
        micro_batch_size: Samples of a step.
        goals: Lower bounds: "tokens_per_second", "mfu", "ratio_of_peer".
        flags: More flags for `lmcore train`.
        steps: Steps of `lmcore train`; the first third is not counted.
        peer: True if the peers' loops run too.
        memory: Bytes of device memory that it needs; a device with less leaves it out.
    """

    model: str
    micro_batch_size: int
    goals: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    steps: int = 30
    peer: bool = True
    memory: float = 0.0


@dataclass(frozen=True)
class Suite:
    """Run of the suite: on which device, in which precision, and what it is held to.

    Attributes:
        device: lmcore's device type.
        precision: `--precision` of all cases.
        peak: FLOP/s that the goals' MFU is of; None: what the plugin knows of the device.
        cases: Rows of the speed table.
        tests: Test files and folders that need the device.
        triton: True if kernels in Triton are measured beside what the compiler makes, too.
        compiled: True if the loops beside lmcore are compiled.
        curve_steps: Steps of the loss curves.
        flags: Flags of `installed.py` that this suite was given, for the scripts that it starts.
        patience: Factor of all time limits.
        least: Lower bounds of every row, beside its goals: "ratio_of_bare".
        most: Upper bounds of every row: "warm_start_seconds".
    """

    device: str
    precision: str
    peak: float | None
    cases: tuple[Case, ...]
    tests: tuple[str, ...] = ()
    triton: bool = False
    compiled: bool = True
    curve_steps: int = 100
    flags: tuple[str, ...] = ()
    patience: float = 1.0
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)

    @property
    def toy(self) -> bool:
        """True if sizes are tiny and nothing is measured."""
        return "--toy" in self.flags


class Runner:
    """Runs parts in processes, each within what is left of the time."""

    def __init__(
        self, suite: Suite, out: Path, seconds: float, contenders: Sequence[str] = ()
    ) -> None:
        """Begin; *contenders* are rows of the speed table, none: all."""
        self.suite, self.out, self.contenders = suite, out, tuple(contenders)
        self.end = time.monotonic() + seconds
        self.results: dict[str, Any] = {"device": suite.device}
        self.folder = Path(tempfile.mkdtemp(prefix="suite-"))
        self.logs = self.folder / "logs"
        self.logs.mkdir()
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        self.caches = {name: str(self.folder / folder) for name, folder in caches.items()}
        out.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep_logs()
        shutil.rmtree(self.folder, ignore_errors=True)

    def note(self, name: str, value: Any, *, shown: str | None = None) -> None:
        """Keep a result, write all of them, and show it, or the part of it called *shown*."""
        self.results[name] = value
        text = json.dumps(self.results, indent=1) + "\n"
        (self.out / "results.json").write_text(text, encoding="utf-8")
        if shown is not None:
            name, value = f"{name}.{shown}", value[shown]
        print(f"{name}: {json.dumps(value)[:_SHOWN]}", flush=True)

    def keep_logs(self) -> None:
        """Pack what all processes have printed into OUT/logs.tar.gz."""
        packed = self.folder / "logs.tar.gz"
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(self.logs, "logs")
        shutil.copy(packed, self.out)

    def process(
        self, command: Sequence[str], name: str, *, seconds: float = 600.0, **env: str
    ) -> tuple[int | None, str]:
        """Return how a process ended, None for no time, and what it printed."""
        left = self._left(seconds)
        if left <= 0:
            return None, "no time left"
        status: int | None = None
        with (
            self._started(command, name, env) as process,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            status = process.wait(left)
        return status, self._log(name).read_text(encoding="utf-8", errors="replace")

    def until(
        self, command: Sequence[str], name: str, done: Callable[[], bool], *, seconds: float
    ) -> float | None:
        """Return the seconds from a process's start until *done*, and end it; None if never."""
        left = self._left(seconds)
        if left <= 0:
            return None
        end = time.monotonic() + left
        with self._started(command, name, {}) as process:
            began = time.monotonic()
            while time.monotonic() < end:
                if done():
                    return time.monotonic() - began
                if process.poll() is not None:
                    break
                time.sleep(0.02)
        return None

    def answer(self, command: Sequence[str], name: str, **more: Any) -> dict[str, Any]:
        """Return the last line of JSON that a process printed, or how it failed."""
        status, text = self.process(command, name, **more)
        lines = [line for line in text.splitlines() if line.startswith("{")]
        if status == 0 and lines:
            return dict(json.loads(lines[-1]))
        return {"failed": failure(status, text)}

    def _left(self, seconds: float) -> float:
        """Return how long a process may take; 0 where so little is left that none is begun."""
        left = self.end - time.monotonic()
        return min(seconds * self.suite.patience, left) if left >= _TOO_LITTLE else 0.0

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @contextmanager
    def _started(
        self, command: Sequence[str], name: str, env: Mapping[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a process; end what is left of it, and of the processes that it has started."""
        with self._log(name).open("wb") as written:
            process = subprocess.Popen(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.caches, **env},
                process_group=0,
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def failure(status: int | None, text: str) -> str:
    """Return how a process failed, for a table."""
    ended = "out of time" if status is None else f"status {status}"
    return f"{ended}: {' '.join(text.split())[-300:]}"
