"""The levels that a plugin reaches, from the results of its checks: table, JSON and badge."""

from __future__ import annotations

import datetime as dt
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from lmcore.contract import API_VERSION
from lmcore_conformance import SUITE_VERSION
from lmcore_conformance.contribution_report import contribution_lines, described
from lmcore_conformance.declaration import Declaration
from lmcore_conformance.registry import LEVELS, Check
from lmcore_conformance.result import Result, Status
from lmcore_conformance.target import Target

__all__ = ["LevelReport", "Report", "make_report", "render"]

_NAMED = 4
"""Checks that the table names for one reason."""


@dataclass(frozen=True)
class LevelReport:
    """Result of a level.

    Attributes:
        level, name: "L1", "device".
        checks: number of the suite's checks.
        passed, failed, gaps, not_run: number of checks with this end; checks that were not selected
            were not run.
        verdict: "reached" where every check that no requirement excuses has passed, none has
            failed and none was not run; "failed", "incomplete", "in part", "not claimed", "not run"
            or "not applicable" else.
        left: ids of the checks that were not run, if other checks of the level were.
        not_applicable: number of further checks that touch nothing of the plugin, if it brings no
            device and is tried alone.
    """

    level: str
    name: str
    checks: int
    passed: int
    failed: int
    gaps: int
    not_run: int
    verdict: str
    left: tuple[str, ...] = ()
    not_applicable: int = 0

    @property
    def claimed(self) -> float:
        """Share of its checks that the plugin does not declare to be gaps."""
        return 1 - self.gaps / self.checks if self.checks else 0.0


@dataclass(frozen=True)
class Report:
    """Result of a run of the suite.

    Attributes:
        plugin: Name, distribution, version.
        versions: versions of suite, contract, lmcore, torch and Python.
        date: date of the run.
        machine: description of the machine.
        levels: In order.
        checks: Every check, with its result.
        gaps: reason of each declared gap, by requirement or check.
        device: type of the device; empty if none was used.
        alone: True if the offers of a plugin without a device were tried alone.
        plugins: plugins that took part, each with its version and contributions.
    """

    plugin: Mapping[str, str]
    versions: Mapping[str, str]
    date: str
    machine: str
    levels: tuple[LevelReport, ...]
    checks: tuple[Mapping[str, Any], ...]
    gaps: Mapping[str, str]
    device: str
    alone: bool
    plugins: tuple[Mapping[str, Any], ...]

    @property
    def reached(self) -> list[str]:
        """Levels that are reached, from the first one without a gap between them."""
        found = []
        for level in self.levels:
            if level.verdict == "reached":
                found.append(level.level)
            elif level.verdict != "not applicable":
                break
        return found

    @property
    def claimed(self) -> float:
        """Share of all checks that the plugin does not declare to be gaps."""
        total = sum(level.checks for level in self.levels)
        return 1 - sum(level.gaps for level in self.levels) / total if total else 0.0

    @property
    def badge(self) -> str:
        """One line for a badge."""
        levels = self.reached
        further = [
            level.level
            for level in self.levels
            if level.verdict == "reached" and level.level not in levels
        ]
        span = "none"
        if self.alone:
            span = ", ".join(levels) or span
        elif levels:
            span = levels[0] if len(levels) == 1 else f"{levels[0]}-{levels[-1]}"
        more = f" and {', '.join(further)}" if further and levels else ", ".join(further)
        span = f"{span}{more}" if levels or not further else more
        passed = sum(level.passed for level in self.levels)
        total = sum(level.checks for level in self.levels)
        left = sum(level.not_run for level in self.levels)
        # The claimed share is not known while checks were not run.
        share = f"{left} not run" if left else f"{self.claimed:.0%} claimed"
        count = f"{passed} of {total} checks{' that apply' if self.alone else ''}"
        return (
            f"lmcore conformance {self.versions['suite']}: {self._names}{span} | {count}, {share}"
        )

    @property
    def _names(self) -> str:
        """The plugins of the badge, if they are not a device's alone."""
        shown = [f"{one['name']} {one['version']}" for one in self.plugins if one["brings"]]
        if self.alone:
            return (
                f"{self.plugin['name']} {self.plugin['version']} on {self.device or 'no device'}: "
            )
        return f"{shown[0]} with {', '.join(shown[1:])}: " if shown[1:] else ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        values = asdict(self)
        for value, level in zip(values["levels"], self.levels, strict=True):
            value["claimed"] = round(level.claimed, 4)
        return values | {"reached": self.reached, "claimed": self.claimed, "badge": self.badge}


def make_report(
    target: Target,
    declaration: Declaration,
    checks: Sequence[Check],
    results: Mapping[str, Result],
    *,
    contributions: Sequence[Mapping[str, Any]] = (),
    touched: Collection[str] | None = None,
) -> Report:
    """Return the report on *target*.

    Args:
        target: The plugin.
        declaration: abilities that it is declared to lack.
        checks: All of the suite.
        results: By id; a check without one was not run.
        contributions: Contributions of each plugin that took part.
        touched: Ids of the checks that apply; None: all.
    """
    unselected = (Status.NOT_RUN, "not selected")
    untouched = (Status.NOT_APPLICABLE, "it touches nothing of the plugin")
    complete = {
        check.id: Result(check.id, *untouched)
        if touched is not None and check.id not in touched
        else results.get(check.id, Result(check.id, *unselected))
        for check in checks
    }
    rows = tuple(
        {"level": check.level, "title": check.title, **complete[check.id].to_dict()}
        for check in checks
    )
    return Report(
        plugin={
            "name": target.name,
            "distribution": target.record.distribution,
            "version": target.record.version,
        },
        versions={
            "suite": SUITE_VERSION,
            "contract": API_VERSION,
            "lmcore": _version("lmcore"),
            "torch": _version("torch"),
            "python": platform.python_version(),
        },
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        machine=_machine(results.get("device.create")),
        levels=tuple(_level(level, checks, complete, declaration) for level in LEVELS),
        checks=rows,
        gaps=_gaps(declaration, [check for check in checks if _counts(complete[check.id], target)]),
        device=target.device_type,
        alone=target.alone,
        plugins=tuple(
            described(one, complete, device_only=target.alone and one["name"] != target.name)
            for one in contributions
        ),
    )


def _counts(result: Result, target: Target) -> bool:
    """Return True if a check's declared gaps are in the report."""
    return not target.alone or result.status is Status.GAP


def _gaps(declaration: Declaration, checks: Sequence[Check]) -> dict[str, str]:
    """Return the declared gaps of checks, with their reasons."""
    names = {name for check in checks for name in (check.id, *check.requires)}
    declared = {**declaration.closed, **declaration.depends}
    return {name: reason for name, reason in declared.items() if name in names}


def _machine(created: Result | None) -> str:
    """Return the device as its own check describes it; else the host's kind."""
    if created is not None and created.status is Status.PASSED:
        return created.detail
    return platform.machine()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _level(
    level: str, checks: Sequence[Check], results: Mapping[str, Result], declaration: Declaration
) -> LevelReport:
    every = [results[check.id].status for check in checks if check.level == level]
    own = [
        check
        for check in checks
        if check.level == level and results[check.id].status is not Status.NOT_APPLICABLE
    ]
    count = {status: every.count(status) for status in Status}
    gaps = [check for check in own if results[check.id].status is Status.GAP]
    excused = all(check.requires and check.id not in declaration.closed for check in gaps)
    left = tuple(check.id for check in own if results[check.id].status is Status.NOT_RUN)
    if not own:
        verdict = "not applicable"
    elif count[Status.FAILED]:
        verdict = "failed"
    elif count[Status.NOT_RUN] == len(own):
        verdict = "not run"
    elif count[Status.NOT_RUN]:
        verdict = "incomplete"
    elif not count[Status.PASSED]:
        verdict = "not claimed"
    else:
        verdict = "reached" if excused else "in part"
    return LevelReport(
        level,
        LEVELS[level],
        len(own),
        count[Status.PASSED],
        count[Status.FAILED],
        count[Status.GAP],
        count[Status.NOT_RUN],
        verdict,
        () if verdict == "not run" else left,
        count[Status.NOT_APPLICABLE],
    )


def render(report: Report) -> list[str]:
    """Return the lines of the table, of the claims and of the declaration."""
    plugin, versions = report.plugin, report.versions
    software = ", ".join(f"{name} {versions[name]}" for name in ("contract", "lmcore", "torch"))
    head = ("checks", "passed", "failed", "gaps", "not run", "claimed")
    lines = [
        f"`{plugin['name']}` ({plugin['distribution']} {plugin['version']}), {software}",
        report.machine,
        "",
        f"{'level':<16}{''.join(f'{name:>9}' for name in head)}  verdict",
    ]
    for level in report.levels:
        claimed = f"{level.claimed:.0%}" if level.passed + level.failed + level.gaps else ""
        lines.append(
            f"{level.level + ' ' + level.name:<16}{level.checks:>9}{level.passed:>9}"
            f"{level.failed:>9}{level.gaps:>9}{level.not_run:>9}{claimed:>9}  {level.verdict}"
        )
    offers = next((check for check in report.checks if check["id"] == "device.offers-twice"), None)
    if offers is not None and offers["status"] == Status.PASSED:
        lines += ["", f"offers: {offers['detail']}"]
    lines += contribution_lines(report.plugins)
    failed = [check for check in report.checks if check["status"] == Status.FAILED]
    if failed:
        lines += ["", "failed:", *(f"  {check['id']}: {check['detail']:.160}" for check in failed)]
    left = [name for level in report.levels for name in level.left]
    if left:
        lines += ["", "not run:", *_shortened(report, left)]
    if report.gaps:
        lines += ["", "declared gaps:", *(f"  {gap}" for gap in _listed(report.gaps))]
    return [*lines, "", report.badge]


def _shortened(report: Report, names: Sequence[str]) -> Iterable[str]:
    """Yield a line for each reason why checks were not run, with the first of them."""
    details = {check["id"]: check["detail"] for check in report.checks}
    for reason in dict.fromkeys(details[name] for name in names):
        same = [name for name in names if details[name] == reason]
        more = f" and {len(same) - _NAMED} more" if len(same) > _NAMED else ""
        yield f"  {', '.join(same[:_NAMED])}{more}: {reason or 'not selected'}"


def _listed(gaps: Mapping[str, str]) -> Iterable[str]:
    width = max(len(name) for name in gaps)
    return [f"{name:<{width}}  {reason}" for name, reason in sorted(gaps.items())]
