"""All lines of `lmcore plugin check` for one plugin; level 0 of the suite sorts the same lines.

`trial` tries the plugin's hooks in one process; then `launcher_cost` watches fresh processes in
which it is imported, probed and discovered, as every command of lmcore does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lmcore.contract.probe import API_VERSION, Check, CheckStatus
from lmcore.plugin.isolation.subprocess_call import call_isolated
from lmcore_conformance.plugin_check.launcher_cost import DISCOVERY, LAUNCHER
from lmcore_conformance.plugin_check.registrations import reserved_names
from lmcore_conformance.plugin_check.trial import HOOKS_FIRST, read_steps

__all__ = ["SECONDS", "plugin_lines"]

SECONDS = 120.0
"""Time that the trial may take in all; a sixth of it without progress is a hang."""

_WATCH_SECONDS = 60.0
_MODULE = "lmcore_conformance.plugin_check"


def plugin_lines(
    name: str,
    distribution: str,
    *,
    against: str = API_VERSION,
    allow_private: bool = False,
    patience: float = 1.0,
) -> tuple[Check, ...]:
    """Return the lines of a plugin.

    Args:
        name: Its entry point.
        distribution: The package that brings it.
        against: Version of the contract.
        allow_private: True if private names of lmcore are warnings, not failures.
        patience: Factor on the time limits.
    """
    outcome = call_isolated(
        f"{_MODULE}.trial:check_plugin",
        *(name, distribution, against, reserved_names(), allow_private, SECONDS / 6 * patience),
        timeout=SECONDS * patience,
    )
    lines = read_steps(outcome.values, outcome.fault)
    found = list(lines)
    for function, titles, arguments in (
        ("watch_launcher", LAUNCHER, (name, distribution, patience)),
        ("watch_discovery", DISCOVERY, (name, distribution)),
    ):
        obstacle = _obstacle(lines, outcome.fault)
        if obstacle:
            found += [Check(title, CheckStatus.SKIPPED, obstacle) for title in titles]
        else:
            found += _watched(function, titles, arguments, _WATCH_SECONDS * patience)
    return tuple(found)


def _obstacle(lines: Sequence[Check], fault: str) -> str:
    """Return why the plugin cannot be watched in further processes; empty if it can."""
    for line in lines:
        if line.status is CheckStatus.SKIPPED and line.detail.endswith(HOOKS_FIRST):
            return HOOKS_FIRST
        if line.status is not CheckStatus.FAILED:
            continue
        early = line.name in {"import", "lmcore_plugin_info", "lmcore_probe"}
        if early or (fault and line.name.startswith("lmcore_add_")):
            return f"not reached: `{line.name}` failed"
    return ""


def _watched(
    function: str, titles: Sequence[str], arguments: Sequence[Any], timeout: float
) -> Iterator[Check]:
    """Yield the lines of a function of `launcher_cost`, called in a fresh process."""
    outcome = call_isolated(f"{_MODULE}.launcher_cost:{function}", *arguments, timeout=timeout)
    lines = read_steps(outcome.values, "")
    yield from lines
    left = [title for title in titles if title not in {line.name for line in lines}]
    if outcome.fault:
        at = left[0] if left else titles[-1]
        yield Check(at, CheckStatus.FAILED, outcome.fault)
        reason = f"not reached: the process ended at `{at}`"
        yield from (Check(title, CheckStatus.SKIPPED, reason) for title in left[1:])
