"""Checks of each plugin by `lmcore doctor`: its state, versions, own checks and a smoke test.

Checks that run the plugin's code or touch a device run in separate processes with a time
limit, so that a crash in native code or a hanging driver is a line of the report and not its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmcore.base.errors import LmcoreError
from lmcore.cli.doctor.smoke import ALL_REDUCE, DEVICE
from lmcore.cli.plugin.list import installed_versions, wanted_versions
from lmcore.contract.probe import Check, CheckStatus, ProbeState
from lmcore.plugin import PluginRecord, PluginSet, PluginState, launch_env
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
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.store import local_run_env

__all__ = ["plugin_checks"]

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
