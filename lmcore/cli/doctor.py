"""`lmcore doctor`: check this installation, and name the fix of whatever is wrong.

The core's checks run here; each plugin's run in a process of their own with a time limit, so that
a crash in native code or a hanging driver is a line of the report and not its end.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.accelerator.probe import Check, CheckStatus, ProbeState
from lmcore.config.command_line import parse_section
from lmcore.config.option import option
from lmcore.errors import DeviceError
from lmcore.plugins import PluginRecord, PluginSet, PluginState, discover, select

__all__ = ["SUMMARY", "run"]

SUMMARY = "Check this installation and name the fixes."

_STYLES = {
    CheckStatus.OK: "green",
    CheckStatus.WARNING: "yellow",
    CheckStatus.FAILED: "bold red",
    CheckStatus.SKIPPED: "dim",
}
_SMALL_DISK = 5 * 10**9
_FULL_DISK = 10**8
_PLAIN_WIDTH = 120  # columns where the output is no terminal

Group = tuple[str, list[Check]]
"""Whose checks these are, and the checks."""


@dataclass(frozen=True)
class DoctorSection:
    """Check this installation and name the fixes."""

    timeout: float = option(60.0, "Seconds that each plugin's checks may take.", above=0.0)
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore doctor`; return 1 when a check failed, else 0."""
    wanted = parse_section(DoctorSection, argv, command="lmcore doctor")
    plugins = discover()
    groups: list[Group] = [("lmcore", core_checks(plugins))]
    groups += [
        (
            f"plugin {one.name} ({one.distribution} {one.version})",
            plugin_checks(one, wanted.timeout),
        )
        for one in plugins
    ]
    failed = any(check.status is CheckStatus.FAILED for _, checks in groups for check in checks)
    if wanted.json:
        print(json.dumps(_as_dict(groups, passed=not failed), indent=2))
    else:
        _print_text(groups)
    return int(failed)


def core_checks(plugins: PluginSet) -> list[Check]:
    """Return the checks of lmcore itself: interpreter, packages, native code, disk, device."""
    return [_python(), *_packages(), _native_builder(), _disk(Path.cwd()), _device(plugins)]


def plugin_checks(record: PluginRecord, timeout: float) -> list[Check]:
    """Return one plugin's checks: its state, its probe, and its own `lmcore_doctor`."""
    if record.state is PluginState.OFF:
        return [Check("plugin", CheckStatus.SKIPPED, record.reason)]
    if record.state is not PluginState.USABLE:
        fix = f"update or uninstall `{record.distribution}`; `lmcore plugins --verbose` shows more"
        return [Check("plugin", CheckStatus.FAILED, record.reason, fix)]
    checks = [_probe_check(record)] if record.probe else []
    if record.implements("lmcore_doctor"):
        checks += _checks_in_subprocess(record, timeout)
    return checks or [Check("plugin", CheckStatus.OK, "it has no checks of its own")]


def _python() -> Check:
    # An older interpreter cannot even import this file, so there is nothing to compare.
    return Check("python", CheckStatus.OK, f"{platform.python_version()} ({sys.executable})")


def _packages() -> list[Check]:
    """Check every required package against the range that lmcore's own metadata gives."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("lmcore") or ()]
    except importlib.metadata.PackageNotFoundError:
        detail = "lmcore is run from its sources; the ranges of its packages are unknown"
        return [Check("packages", CheckStatus.SKIPPED, detail)]
    checks, fitting = [], []
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        fix = f"pip install '{one.name}{one.specifier}'"
        try:
            found = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(one.name, CheckStatus.FAILED, "not installed", fix))
            continue
        if one.specifier.contains(Version(found).base_version, prereleases=True):
            fitting.append(f"{one.name} {found}")
        else:
            detail = f"{found} is installed, {one.specifier} is needed"
            checks.append(Check(one.name, CheckStatus.FAILED, detail, fix))
    return [Check("packages", CheckStatus.OK, ", ".join(fitting)), *checks]


def _native_builder() -> Check:
    from lmcore.data import native

    if native.available:
        return Check("index builder", CheckStatus.OK, f"native: {native.reason}")
    fix = "install a C++ compiler (g++), then install lmcore again from its folder"
    return Check("index builder", CheckStatus.WARNING, native.reason, fix)


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.1f} GB free for runs in {folder}"
    if free >= _SMALL_DISK:
        return Check("disk", CheckStatus.OK, detail)
    status = CheckStatus.FAILED if free < _FULL_DISK else CheckStatus.WARNING
    return Check("disk", status, detail, "free some space, or save elsewhere with `--save DIR`")


def _device(plugins: PluginSet) -> Check:
    try:
        chosen = select(plugins, env=os.environ)
    except DeviceError as error:
        found = f"{error.what} ({error.why})" if error.why else error.what
        return Check("device", CheckStatus.FAILED, " ".join(found.split()), error.hint)
    return Check(
        "device", CheckStatus.OK, f"a run uses `{chosen.probe.device_type}`: {chosen.reason}"
    )


def _probe_check(record: PluginRecord) -> Check:
    probe = record.probe
    assert probe is not None
    status = {
        ProbeState.PRESENT: CheckStatus.OK,
        ProbeState.ABSENT: CheckStatus.SKIPPED,
        ProbeState.BROKEN: CheckStatus.FAILED,
    }[probe.state]
    found = "; ".join(probe.evidence)
    return Check(f"device {probe.device_type}", status, f"{probe.state}: {found}", probe.fix)


def _checks_in_subprocess(record: PluginRecord, timeout: float) -> list[Check]:
    """Run `lmcore_doctor` of one plugin in a process of its own and return its checks."""
    fix = f"update or uninstall `{record.distribution}`, or report this to its authors"
    with tempfile.TemporaryDirectory(prefix="lmcore-doctor-") as folder:
        answer = Path(folder, "checks.json")
        command = [sys.executable, "-m", "lmcore.cli.doctor_process", record.name, str(answer)]
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            detail = f"no answer within {timeout:g} s; stopped"
            return [Check("checks", CheckStatus.FAILED, detail, fix)]
        if process.returncode == 0 and answer.is_file():
            return _read_checks(answer.read_text(encoding="utf-8"))
    last = errors.strip().splitlines()[-1] if errors.strip() else "it printed nothing"
    return [
        Check(
            "checks", CheckStatus.FAILED, f"{_end_of(process.returncode)}; last line: {last}", fix
        )
    ]


def _end_of(status: int) -> str:
    """Return how a process ended, in words."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the process that ran them was killed by {name}"
    return f"the process that ran them ended with status {status}"


def _read_checks(text: str) -> list[Check]:
    return [Check(**(one | {"status": CheckStatus(one["status"])})) for one in json.loads(text)]


def _as_dict(groups: Sequence[Group], *, passed: bool) -> dict[str, object]:
    return {
        "passed": passed,
        "groups": [
            {"name": name, "checks": [dataclasses.asdict(check) for check in checks]}
            for name, checks in groups
        ],
    }


def _print_text(groups: Sequence[Group]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    width = max(len(check.name) for _, checks in groups for check in checks)
    for title, checks in groups:
        console.print(Text(title, style="bold"))
        table = Table.grid(padding=(0, 2))
        table.add_column(width=9)
        table.add_column(width=width)
        table.add_column(overflow="fold")
        for check in checks:
            found = Text(check.detail)
            if check.fix and check.status is not CheckStatus.OK:
                found.append(f"\nfix: {check.fix}", style="yellow")
            table.add_row(Text(f"  {check.status}", _STYLES[check.status]), check.name, found)
        console.print(table)
    counts = {
        status: sum(check.status is status for _, checks in groups for check in checks)
        for status in CheckStatus
    }
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(f"\n{sum(counts.values())} checks: {told}")
