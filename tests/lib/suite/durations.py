"""Time limits of tests, in seconds of a reference machine, and the record of how long they took.

Machines differ and are busy, so wall-clock seconds alone say little.  Between tests a short
calibration loop is timed; a test's seconds are divided by how much slower the loop runs than on the
reference machine.  Where it runs faster they stay as they are: tests are mostly starts of
processes, imports and files, which are no faster there.  In these seconds

- a test of the fast set may take `LONGEST`, or `LONGEST_SLOW`, its fixtures included;
- the fast tests of a folder may take twice its budget in `tests/budget.toml`.

A session in which one of them took longer fails.  `--record FILE` writes what each test took, for
`summary.py`.
"""

from __future__ import annotations

import json
import statistics
import time
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from suite.selection import SET, is_full

LONGEST = 20.0
"""Seconds that a test of the fast set may take."""
LONGEST_SLOW = 60.0
"""The same for tests marked `slow`: they compile, or prepare the cases of the tests after them."""
TOLERANCE = 2.0
"""Multiple of a folder's budget at which a session fails."""
REFERENCE_LOOP = 0.0178
"""Seconds that the calibration loop takes on the reference machine: two test processes on the two
cores of a Xeon that does nothing else."""
SAMPLE_EVERY = 1.0
"""Seconds between two calibrations."""
SAMPLES = 5
"""Number of calibrations whose median counts."""

_SLOWNESS = "slowness"
_FULL = "full"
_SLOW = "slow"


def calibration_loop() -> float:
    """Time a fixed piece of Python and return its wall-clock seconds."""
    begin = time.perf_counter()
    table: dict[int, int] = {}
    for number in range(240_000):
        table[number & 1023] = number * number % 7
    return time.perf_counter() - begin


class Calibration:
    """Slowness of this process relative to the reference machine, measured at intervals."""

    def __init__(
        self,
        loop: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._clock = loop or calibration_loop, clock
        self._at = -SAMPLE_EVERY
        self._last: deque[float] = deque(maxlen=SAMPLES)

    def sample(self) -> float:
        """Return the slowness, 1 at least: the median of the last measurements, renewed in time.

        One loop is short enough to run between two turns of the other processes.
        """
        if self._clock() - self._at >= SAMPLE_EVERY:
            self._last.append(self._loop() / REFERENCE_LOOP)
            self._at = self._clock()
        return max(1.0, statistics.median(self._last))


@dataclass
class Taken:
    """Time and outcome of a test over all its phases.

    Attributes:
        seconds: Wall-clock seconds.
        reference: Seconds of the reference machine.
        full: True if the test belongs to the full set alone.
        slow: True if the test is marked `slow`.
        outcome: "passed", "failed" or "skipped".
    """

    seconds: float = 0.0
    reference: float = 0.0
    full: bool = False
    slow: bool = False
    outcome: str = "passed"

    def add(self, report: pytest.TestReport) -> None:
        """Add a phase."""
        facts = dict(report.user_properties)
        self.seconds += report.duration
        # The last phase knows best: a calibration after a long test is in it.
        self.reference = self.seconds / max(float(str(facts.get(_SLOWNESS, 1.0))), 1e-3)
        self.full, self.slow = _FULL in facts, _SLOW in facts
        if report.outcome != "passed" and self.outcome != "failed":
            self.outcome = report.outcome


@dataclass
class Limits:
    """Limits of the fast set.

    Attributes:
        folders: Budget in seconds of the reference machine, by folder; a test counts for the
            innermost one.
    """

    folders: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Limits:
        """Read the budget file."""
        return cls(tomllib.loads(path.read_text(encoding="utf-8"))["seconds"])

    def folder_of(self, nodeid: str) -> str | None:
        """Return the innermost folder with a budget that has a test; None if there is none."""
        file = Path(nodeid.partition("::")[0])
        return next((str(folder) for folder in file.parents if str(folder) in self.folders), None)

    def used(self, taken: Mapping[str, Taken]) -> dict[str, float]:
        """Return the seconds that the fast tests of each folder took."""
        found: defaultdict[str, float] = defaultdict(float)
        for nodeid, test in taken.items():
            folder = self.folder_of(nodeid)
            if folder is not None and not test.full:
                found[folder] += test.reference
        return dict(found)

    def exceeded(self, taken: Mapping[str, Taken]) -> Iterator[str]:
        """Yield a sentence for each test and each folder that took too long."""
        for nodeid, test in taken.items():
            longest = LONGEST_SLOW if test.slow else LONGEST
            if test.reference > longest and not test.full:
                yield (
                    f"{nodeid} took {test.reference:.1f} s, over {longest:g}: "
                    "make it faster, or mark it `full`"
                )
        for folder, seconds in self.used(taken).items():
            budget = self.folders[folder]
            if seconds > TOLERANCE * budget:
                yield (
                    f"{folder} took {seconds:.0f} s, over {TOLERANCE:g} times its budget of "
                    f"{budget:g} (tests/budget.toml)"
                )


class Durations:
    """Plugin of the session: measures tests, holds them to their limits, writes the record."""

    def __init__(self, config: pytest.Config, limits: Limits) -> None:
        self._config, self._limits = config, limits
        self._calibration = Calibration()
        self._taken: defaultdict[str, Taken] = defaultdict(Taken)
        self._slowness: list[float] = []
        self._exceeded: list[str] = []
        self._begin = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Attach to a test's reports what is needed to judge its time."""
        item.user_properties.append((_SLOWNESS, round(self._calibration.sample(), 3)))
        if is_full(item):
            item.user_properties.append((_FULL, True))
        if item.get_closest_marker("slow"):
            item.user_properties.append((_SLOW, True))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Calibrate again after a long test: it has the benefit of the slower of both times."""
        before = float(str(item.user_properties[0][1]))
        after = round(self._calibration.sample(), 3)
        item.user_properties[0] = (_SLOWNESS, max(before, after))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._taken[report.nodeid].add(report)
        slowness = dict(report.user_properties).get(_SLOWNESS)
        if slowness is not None and report.when == "teardown":
            self._slowness.append(float(str(slowness)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail if something took too long, and write the record."""
        if hasattr(self._config, "workerinput"):
            return
        path = self._config.getoption("record")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._record(path.stem)), encoding="utf-8")
        options = self._config.option
        free = options.no_time_limits or options.usepdb or self._config.stash[SET].full
        self._exceeded = [] if free else list(self._limits.exceeded(self._taken))
        if self._exceeded and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _record(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "set": str(self._config.stash[SET]),
            "seconds": time.monotonic() - self._begin,
            "slowness": statistics.median(self._slowness) if self._slowness else 1.0,
            "outcomes": Counter(test.outcome for test in self._taken.values()),
            "tests": {nodeid: vars(test) for nodeid, test in self._taken.items()},
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name what took too long."""
        if self._exceeded:
            terminalreporter.section("too slow, in seconds of the reference machine", red=True)
            for line in self._exceeded:
                terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("lmcore")
    group.addoption("--record", type=Path, help="write what each test took to this file")
    group.addoption(
        "--no-time-limits",
        action="store_true",
        help="let tests take any time, as under a debugger or a tracer",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin of this session."""
    limits = Limits.read(config.rootpath / "tests" / "budget.toml")
    config.pluginmanager.register(Durations(config, limits), "durations")
