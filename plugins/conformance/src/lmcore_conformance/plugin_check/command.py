"""`lmcore plugin check`: checks a plugin against the contract, and names each fault.

The plugin is loaded and called in separate processes (`lmcore_conformance.plugin_check.lines`)
with time limits, so that a crash in its native code, or a hang, is a finding like any other.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from lmcore.base.errors import ConfigError, counted, nearest, suggestion
from lmcore.cli.doctor.text import ReportText
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section
from lmcore.contract.probe import API_VERSION, Check, CheckStatus
from lmcore.plugin.discovery import GROUP
from lmcore.plugin.isolation.subprocess_call import call_isolated
from lmcore_conformance.contract.snapshot import load_contract
from lmcore_conformance.plugin_check.lines import SECONDS, plugin_lines

__all__ = ["CheckSection", "run"]

_EPILOG = """\
Exit status: 0 if no check failed, 1 if one did, 2 if there is no such package.  Checks that need a
device which is absent are skipped, and listed as skipped.  Names of lmcore that are not in the
contract are failures, because any release may change them.

  lmcore plugin check lmcore-mychip
  lmcore plugin check mychip --against 1.0 --json"""


@dataclass(frozen=True)
class CheckSection:
    """Check a plugin: call its hooks, and name each fault with its cause."""

    package: str = option(REQUIRED, "Package of the plugin, or the plugin's name.")
    against: str = option(API_VERSION, "Version of the plugin contract.", metavar="VERSION")
    allow_private: bool = option(
        False, "Report private names of lmcore that it uses as warnings, not as failures."
    )
    timeout: float = option(
        SECONDS,
        "Seconds that the plugin may take; a sixth of it without progress is a hang.",
        above=0.0,
    )
    json: bool = option(False, "Print JSON.")


@dataclass(frozen=True)
class _Plugin:
    """An entry point that is to be checked, and its findings."""

    name: str
    distribution: str
    version: str
    target: str
    checks: tuple[Check, ...] = ()

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return all(check.status is not CheckStatus.FAILED for check in self.checks)


def run(argv: list[str]) -> int:
    """Run `lmcore plugin check ...` and return the exit status."""
    wanted = parse_section(
        CheckSection,
        argv,
        command="lmcore plugin check",
        positionals=("package",),
        epilog=_EPILOG,
    )
    load_contract(wanted.against)
    plugins = [_tried(point, wanted) for point in _find(wanted.package, wanted.timeout)]
    passed = all(plugin.passed for plugin in plugins)
    if wanted.json:
        print(json.dumps(_as_dict(plugins, wanted, passed=passed), indent=2))
    else:
        _print_text(plugins, wanted.against)
    return 0 if passed else 1


def _find(package: str, timeout: float) -> list[_Plugin]:
    """Return the plugins of a distribution, or the one of this name.

    Raises:
        ConfigError: Nothing of that name is installed.
    """
    points = [
        _Plugin(point.name, point.dist.name, point.dist.version, point.value)
        for point in importlib.metadata.entry_points(group=GROUP)
        if point.dist is not None
    ]
    wanted = canonicalize_name(package)
    found = [point for point in points if canonicalize_name(point.distribution) == wanted]
    found = found or [point for point in points if point.name == package]
    if found:
        return found
    try:
        installed = importlib.metadata.distribution(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        pass
    else:
        checks = (_no_entry_point(installed),)
        return [_Plugin(package, installed.name, installed.version, "", checks)]
    names = (
        call_isolated("lmcore_conformance.plugin_check.trial:plugin_names", timeout=timeout).value
        or {}
    )
    if package in names:
        return [point for point in points if point.name == names[package]]
    known = {*(point.name for point in points), *(point.distribution for point in points)}
    raise ConfigError(
        f"no package or plugin `{package}` is installed",
        why="looked for a distribution of that name, and among the entry points of "
        f"`{GROUP}`, in {_python()}",
        hint=suggestion(package, known),
    )


def _python() -> str:
    import sys

    return sys.executable


def _no_entry_point(installed: importlib.metadata.Distribution) -> Check:
    groups = {point.group for point in installed.entry_points}
    close = nearest(GROUP, groups)
    return Check(
        "entry point",
        CheckStatus.FAILED,
        f"the package is installed, and has no entry point in the group `{GROUP}`"
        + (f", but one in `{close}`" if close else ""),
        f'in its pyproject.toml: `[project.entry-points."{GROUP}"]`, then `NAME = "MODULE"`',
    )


def _tried(plugin: _Plugin, wanted: CheckSection) -> _Plugin:
    """Return the plugin with its findings."""
    if plugin.checks:
        return plugin
    rivals = [
        point.dist.name
        for point in importlib.metadata.entry_points(group=GROUP, name=plugin.name)
        if point.dist is not None and point.dist.name != plugin.distribution
    ]
    if rivals:
        detail = f"the name `{plugin.name}` is also taken by `{'`, `'.join(rivals)}`"
        first = Check("entry point", CheckStatus.FAILED, detail, "uninstall one of them")
    else:
        first = Check("entry point", CheckStatus.OK, f"`{plugin.name} = {plugin.target}`")
    lines = plugin_lines(
        plugin.name,
        plugin.distribution,
        against=wanted.against,
        allow_private=wanted.allow_private,
        patience=wanted.timeout / SECONDS,
    )
    return dataclasses.replace(plugin, checks=(first, *lines))


def _as_dict(
    plugins: Sequence[_Plugin], wanted: CheckSection, *, passed: bool
) -> dict[str, object]:
    return {
        "package": wanted.package,
        "against": wanted.against,
        "passed": passed,
        "plugins": [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "entry_point": plugin.target,
                "passed": plugin.passed,
                "checks": [dataclasses.asdict(check) for check in plugin.checks],
            }
            for plugin in plugins
        ],
    }


def _print_text(plugins: Sequence[_Plugin], against: str) -> None:
    report = ReportText()
    for plugin in plugins:
        report.group(
            f"plugin {plugin.name} ({plugin.distribution} {plugin.version})", plugin.checks
        )
    report.end()
    for plugin in plugins:
        failed = sum(check.status is CheckStatus.FAILED for check in plugin.checks)
        skipped = sum(check.status is CheckStatus.SKIPPED for check in plugin.checks)
        if failed:
            finding = counted(failed, "finding")
            print(
                f"`{plugin.name}` does not work with version {against} of the contract: {finding}."
            )
        elif skipped:
            print(f"Nothing is wrong with `{plugin.name}` in what could be checked here.")
        else:
            print(f"`{plugin.name}` works with version {against} of the contract.")
