"""`lmcore doctor`: check this installation, and name the fix of whatever is wrong.

The core's checks run here; each plugin's, and a smoke test of each
device, in separate processes (`lmcore.cli.doctor.plugin`, `lmcore.cli.doctor.smoke`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.errors import DeviceError, PluginError
from lmcore.cli.doctor.plugin import plugin_checks
from lmcore.cli.doctor.text import ReportText
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.contract.probe import Check, CheckStatus
from lmcore.plugin import PluginSet, discover, select
from lmcore.plugin.isolation.subprocess_call import in_one_line
from lmcore.plugin.torch_backends import installed_backends
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
