"""`lmcore doctor`: check this installation, and name the fix of whatever is wrong.

The core's checks run here; each plugin's, and a smoke test of each device
(`lmcore.cli.doctor.smoke`), in separate processes with a time limit, so that a crash in native code
or a hanging driver is a line of the report and not its end.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.base.errors import DeviceError, LmcoreError, PluginError
from lmcore.cli.doctor.smoke import ALL_REDUCE, DEVICE
from lmcore.cli.doctor.text import ReportText
from lmcore.cli.plugin.list import installed_versions, wanted_versions
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.contract.probe import Check, CheckStatus, ProbeState
from lmcore.plugin import PluginRecord, PluginSet, PluginState, discover, launch_env, select
from lmcore.plugin.discovery import ALLOW_LIST, OFF
from lmcore.plugin.isolation.subprocess_call import (
    Call,
    Outcome,
    call_isolated,
    call_together,
    in_one_line,
)
from lmcore.plugin.record import CPU
from lmcore.plugin.selection import HANDED_DOWN, chosen_plugin
from lmcore.plugin.torch_backends import installed_backends
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.store import local_run_env
from lmcore.runtime.torch_import import broken_backend

__all__ = ["core_checks", "run"]

Group = tuple[str, list[Check]]
"""Title of a group, and its checks."""
_SMALL_DISK = 5 * 10**9
_FULL_DISK = 10**8


@dataclass(frozen=True)
class DoctorSection:
    """Check this installation and name the fixes."""

    timeout: float = option(
        60.0,
        "Seconds for each of a plugin's own checks, the test of its device, and the all-reduce.",
        above=0.0,
    )
    plugin_off: tuple[str, ...] = plugin_off_option()
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore doctor`; return 1 when a check failed, else 0."""
    wanted = parse_section(DoctorSection, argv, command="lmcore doctor")
    found = _groups(discover(off=wanted.plugin_off), wanted.timeout)
    groups: list[Group] = []
    if wanted.json:
        groups += found
    else:
        text = ReportText()
        for title, checks in found:
            text.group(title, checks)
            groups.append((title, checks))
        text.end()
    failed = any(check.status is CheckStatus.FAILED for _, checks in groups for check in checks)
    if wanted.json:
        print(json.dumps(_as_dict(groups, passed=not failed), indent=2))
    return int(failed)


def _groups(plugins: PluginSet, timeout: float) -> Iterator[Group]:
    """Yield the groups of checks, each when it is done."""
    broken = broken_backend()
    yield "lmcore", [*core_checks(plugins), *_torch_checks(broken)]
    for one in plugins:
        title = f"plugin {one.name} ({one.distribution} {one.version})"
        yield title, plugin_checks(one, plugins, timeout, has_torch=broken is None)


def _as_dict(groups: Sequence[Group], *, passed: bool) -> dict[str, object]:
    return {
        "passed": passed,
        "groups": [
            {"name": name, "checks": [dataclasses.asdict(check) for check in checks]}
            for name, checks in groups
        ],
    }


def core_checks(plugins: PluginSet) -> list[Check]:
    """Return the checks of lmcore itself: interpreter, packages, native code, disk, device."""
    return [_python(), *_packages(), _native_code(), _disk(), _device(plugins)]


def _torch_checks(broken: PluginError | None) -> list[Check]:
    """Return the check of the backends that other packages add to torch, if there are any.

    Args:
        broken: See `broken_backend`.
    """
    if broken is not None:
        return [Check("torch backends", CheckStatus.FAILED, in_one_line(broken), broken.hint)]
    backends = installed_backends()
    if not backends:
        return []
    return [Check("torch backends", CheckStatus.OK, f"torch loads {', '.join(backends)}")]


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


def _native_code() -> Check:
    from lmcore.data import native

    if native.available:
        return Check("native code", CheckStatus.OK, native.reason)
    fix = "install a C++ compiler (g++), then install lmcore again from its folder"
    return Check("native code", CheckStatus.WARNING, native.reason, fix)


def _disk() -> Check:
    try:
        folder = Path.cwd()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        detail = f"the working directory cannot be used: {error.strerror}"
        return Check("disk", CheckStatus.FAILED, detail, "change to a directory that exists")
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


_SMOKE = "lmcore.cli.doctor.smoke"


def plugin_checks(
    record: PluginRecord, plugins: PluginSet, timeout: float, *, has_torch: bool = True
) -> list[Check]:
    """Return one plugin's checks.

    Args:
        record: The plugin.
        plugins: All that were found: those without a device take part in the smoke test.
        timeout: Seconds that each part of the checks may take.
        has_torch: False if torch cannot be imported, which is not the plugin's fault.
    """
    if record.state is PluginState.OFF:
        return [Check("plugin", CheckStatus.SKIPPED, record.reason)]
    if record.state is not PluginState.USABLE:
        fix = f"update or uninstall `{record.distribution}`; `lmcore plugins --verbose` shows more"
        return [Check("plugin", CheckStatus.FAILED, record.reason, fix)]
    checks = _versions(record)
    if record.probe:
        checks.append(_probe_check(record))
    if not has_torch:
        return [*checks, Check("checks", CheckStatus.SKIPPED, "torch cannot be imported")]
    if record.implements("lmcore_doctor"):
        checks += _own_checks(record, plugins, timeout)
    if record.probe and record.probe.state is ProbeState.PRESENT:
        checks += _device_checks(record, plugins, timeout)
        checks.append(_all_reduce(record, plugins, timeout))
    return checks


def _versions(record: PluginRecord) -> list[Check]:
    """Return the versions that the plugin requires, and the installed ones below torch."""
    found = installed_versions(record)
    return [
        Check("works with", CheckStatus.OK, wanted_versions(record)),
        *([Check("versions", CheckStatus.OK, found)] if found else []),
    ]


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


def _own_checks(record: PluginRecord, plugins: PluginSet, timeout: float) -> list[Check]:
    """Return the checks of the plugin's `lmcore_doctor`."""
    outcome = call_isolated(
        f"{_SMOKE}:own_checks", record.name, timeout=timeout, env=_only(record, plugins)
    )
    checks = _read(outcome.value or [])
    if not outcome.complete:
        checks.append(Check("checks", CheckStatus.FAILED, outcome.fault, _blame(record, outcome)))
    return checks


def _device_checks(record: PluginRecord, plugins: PluginSet, timeout: float) -> list[Check]:
    """Return what became of the device, its products and its generator."""
    try:
        env = _worker_env(record, plugins, RankInfo())
    except LmcoreError as error:
        return [_failure(DEVICE, error)]
    return _completed(
        call_isolated(f"{_SMOKE}:device_checks", timeout=timeout, env=env), DEVICE, record
    )


def _all_reduce(record: PluginRecord, plugins: PluginSet, timeout: float) -> Check:
    """Return what became of an all-reduce over two processes, or over as many as devices allow."""
    assert record.probe is not None
    shared = record.probe.device_type == CPU or record.probe.facts.get("on_host") is True
    size = 2 if shared else min(2, record.probe.count)
    address = local_run_env()
    calls = []
    for rank in range(size):
        try:
            env = _worker_env(record, plugins, RankInfo(rank, rank, size, size))
        except LmcoreError as error:
            return _failure(ALL_REDUCE, error)
        calls.append(Call(f"{_SMOKE}:reduction", (timeout,), {**env, **address}))
    outcomes = call_together(calls, timeout=timeout)
    found = [_completed(outcome, ALL_REDUCE, record)[-1] for outcome in outcomes]
    return _worst(found, outcomes)


def _worst(found: Sequence[Check], outcomes: Sequence[Outcome]) -> Check:
    """Return one check for all ranks: rank 0's, or the one with the most on a failure."""

    def weight(rank: int) -> tuple[bool, bool, bool]:
        failed = found[rank].status is CheckStatus.FAILED
        # A crash explains more than the message of a rank that waited or was stopped for it.
        stopped = "stopped the run" in found[rank].detail or "no answer" in found[rank].detail
        return failed, not stopped, not outcomes[rank].complete

    worst = max(range(len(found)), key=weight)
    check = found[worst]
    if check.status is not CheckStatus.FAILED or len(found) == 1:
        return check
    return Check(check.name, check.status, f"rank {worst}: {check.detail}", check.fix)


def _completed(outcome: Outcome, name: str, record: PluginRecord) -> list[Check]:
    """Return the checks that came back; a crash is the failure of the check that had begun."""
    begun = [one["begins"] for one in outcome.values if "begins" in one]
    checks = _read(one for one in outcome.values if "begins" not in one)
    if not outcome.complete:
        pending = begun[-1] if len(begun) > len(checks) else name
        checks.append(Check(pending, CheckStatus.FAILED, outcome.fault, _blame(record, outcome)))
    return checks


def _worker_env(record: PluginRecord, plugins: PluginSet, place: RankInfo) -> dict[str, str]:
    """Return the environment of a worker that uses the plugin's device.

    Raises:
        PluginError: The plugin's launch environment cannot be had.
    """
    selection = chosen_plugin(plugins, record, "`lmcore doctor` tries every present device")
    env = _only(record, plugins)
    # The launcher of this process has no part in the workers' world.
    env = {name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_")}
    env |= {**place.to_env(), HANDED_DOWN: selection.to_json()}
    return env | launch_env(plugins, selection, place.to_dict(), env)


def _only(record: PluginRecord, plugins: PluginSet) -> dict[str, str]:
    """Return the environment in which no plugin is loaded but this one and additions to it."""
    names = [one.entry_point for one in plugins.participants(record.name)]
    env = {name: value for name, value in os.environ.items() if name != OFF}
    return env | {ALLOW_LIST: ",".join(names)}


def _read(values: Iterable[Mapping[str, Any]]) -> list[Check]:
    return [Check(**{**one, "status": CheckStatus(one["status"])}) for one in values]


def _failure(name: str, error: LmcoreError) -> Check:
    return Check(name, CheckStatus.FAILED, in_one_line(error), error.hint)


def _blame(record: PluginRecord, outcome: Outcome) -> str:
    remedy = f"update or uninstall `{record.distribution}`, or report this to its authors"
    if "no answer" in outcome.fault:
        return f"on a busy or slow machine try `--timeout 300`; otherwise {remedy}"
    return remedy
