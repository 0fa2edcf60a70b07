"""`lmcore doctor`: check this installation, and name the fix of whatever is wrong.

The core's checks run here (`lmcore.cli.doctor.core`); each plugin's, and a smoke test of each
device, in separate processes (`lmcore.cli.doctor.plugin`, `lmcore.cli.doctor.smoke`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmcore.accelerator.probe import Check, CheckStatus
from lmcore.cli.doctor.core import core_checks, torch_checks
from lmcore.cli.doctor.plugin import plugin_checks
from lmcore.cli.doctor.text import ReportText
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.plugin import PluginSet, discover
from lmcore.runtime.torch_import import broken_backend

__all__ = ["run"]

Group = tuple[str, list[Check]]
"""Title of a group, and its checks."""


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
    yield "lmcore", [*core_checks(plugins), *torch_checks(broken)]
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
