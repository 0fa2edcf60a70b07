"""Discovery of plugins: find the installed ones, load each one in isolation, call info and probe.

We load the entry points ourselves: pluggy's loader lets one bad plugin take all others down and
silently drops the second of two with one name.  Copies of this process go first
(`lmcore.plugin.isolation.fork_trial`), so that a crash in native code or a hanging driver is a
plugin's state like any other.  Loads no torch, and checks everything that a plugin returns.

Environment variables of lmcore, so that a misspelt one is noticed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lmcore import hookspecs
from lmcore.base import log
from lmcore.base.errors import ConfigError, nearest, suggestion
from lmcore.contract.probe import Probe
from lmcore.plugin.known_packages import GROUP
from lmcore.plugin.load import distribution_of, load, probe_as_json, record_of
from lmcore.plugin.record import CPU, PluginRecord, PluginSet, PluginState
from lmcore.plugin.registrations import (
    register_engines,
    register_families,
    register_formats,
    register_loggers,
)

if TYPE_CHECKING:
    from lmcore.plugin.isolation.fork_trial import Attempt, Trial


__all__ = [
    "ALLOW_LIST",
    "GROUP",
    "OFF",
    "VARIABLES",
    "discover",
    "warn_unknown_variables",
]

logger = logging.getLogger(__name__)

_PREFIX = "LMCORE_"
_OF_WORKERS = "LMCORE_SELECTION"
VARIABLES = (
    "LMCORE_CORPORA",
    "LMCORE_DEVICE",
    "LMCORE_LAUNCHED",
    "LMCORE_PLUGINS",
    "LMCORE_PLUGIN_OFF",
    "LMCORE_SECRET",
    "LMCORE_SECRET_FILE",
    _OF_WORKERS,
)
"""Names of all variables of lmcore; a plugin's own begin with LMCORE_ and the plugin's name."""


def warn_unknown_variables(env: Mapping[str, str], plugins: Iterable[str]) -> None:
    """Log a warning for each variable with lmcore's prefix that neither lmcore nor a plugin reads.

    Processes that lmcore starts do not repeat it.

    Args:
        env: Environment of the process.
        plugins: Names of the installed plugins.
    """
    unknown = sorted(name for name in env if name.startswith(_PREFIX) and name not in VARIABLES)
    if not unknown or _OF_WORKERS in env:
        return
    of_plugins = tuple(f"{_PREFIX}{name.upper().replace('-', '_')}_" for name in plugins)
    for name in unknown:
        if not name.startswith(of_plugins):
            near = nearest(name, VARIABLES)
            meant = f"; did you mean `{near}`?" if near else ""
            text = "`%s` has no effect: lmcore has no such variable%s"
            log.warn_once(logger, text, name, meant, all_ranks=True)


ALLOW_LIST = "LMCORE_PLUGINS"
"""Environment variable: names of the plugins to load beside the CPU's, separated by commas."""

OFF = "LMCORE_PLUGIN_OFF"
"""Environment variable: names of the plugins to leave out, separated by commas."""

_REGISTERING = tuple(name for name in vars(hookspecs) if name.startswith("lmcore_add_"))
"""Hooks that are called in the launcher, where a crash would take the command down."""

_TRIAL_SECONDS = 20.0
"""Until a plugin's import, or its probe, counts as hung: a cold driver may take many seconds."""

_SLOW_SECONDS = 3.0
"""Wall time of a plugin's import, or its probe, from which on it is named as slow."""


def discover(
    *,
    env: Mapping[str, str] = os.environ,
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    off: Iterable[str] = (),
    probe: bool = True,
) -> PluginSet:
    """Return a record of every installed plugin: loaded, checked and probed, or why not.

    No plugin can make this fail; its exceptions end in its own record.

    Args:
        env: The process environment, handed to the probes.
        entry_points: entry points to load; default: the installed ones.
        off: Names of plugins to leave out, as `--plugin-off` gives them.
        probe: True to look for devices; commands that only list commands and options do without.

    Raises:
        ConfigError: `LMCORE_PLUGINS`, `LMCORE_PLUGIN_OFF` or *off* names a plugin that is not
            installed, or the CPU's is to be left out.
    """
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=GROUP)
    entry_points = tuple(entry_points)
    warn_unknown_variables(env, [point.name for point in entry_points])
    points = sorted(entry_points, key=lambda point: (point.name, distribution_of(point)))
    sources = dict.fromkeys(_names(env.get(OFF, "")), OFF) | dict.fromkeys(off, "--plugin-off")
    reasons = _left_out(env, sources, [point.name for point in points])
    records: dict[importlib.metadata.EntryPoint, PluginRecord] = {}
    for point in points:
        namesakes = [other for other in points if other.name == point.name and other != point]
        if point.name in reasons:
            records[point] = record_of(point, PluginState.OFF, reasons[point.name])
        elif namesakes:
            reason = _taken(point.name, [point, *namesakes])
            records[point] = record_of(point, PluginState.FAILED, reason)
    wanted = [point for point in points if point not in records]
    trials = _try_in_copy(wanted, env, probe=probe)
    probes = {name: trial.answer for name, trial in trials.items()}
    for point in wanted:
        records[point] = _loaded(point, trials.get(point.name))
    found = PluginSet(tuple(_without_namesakes([records[point] for point in points])))
    for name, source in sources.items():  # a plugin may call itself otherwise than its entry point
        found = found.without([name], source)
    register_families(found)
    register_formats(found)
    register_engines(found)
    register_loggers(found)
    if not probe:
        return found
    return PluginSet(
        tuple(_probed(record, env, probes.get(record.entry_point)) for record in found)
    )


def _left_out(
    env: Mapping[str, str], off: Mapping[str, str], installed: Sequence[str]
) -> dict[str, str]:
    """Return the entry points that are not to be loaded, each with the reason; never the CPU's."""
    found = {name: f"`{source}` leaves it out" for name, source in off.items() if name != CPU}
    if ALLOW_LIST not in env:
        return found
    allowed = _names(env[ALLOW_LIST])
    for name in sorted(set(allowed) - set(installed) - {CPU}):
        raise ConfigError(
            f"`{ALLOW_LIST}` names the plugin `{name}`, which is not installed",
            hint=suggestion(name, set(installed)),
        )
    unlisted = (name for name in installed if name not in {CPU, *allowed})
    return dict.fromkeys(unlisted, f"`{ALLOW_LIST}` leaves it out") | found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class _NullRegistry:
    """Registry that takes everything and keeps nothing."""

    def add(self, *_: Any, **__: Any) -> None:
        """Take what a plugin adds."""


def _loaded(point: importlib.metadata.EntryPoint, trial: Trial | None) -> PluginRecord:
    """Return the record of a plugin, which is loaded here unless it failed in its trial."""
    if trial is not None and trial.fault:
        reason = f"{trial.phase}: {trial.fault}"
        return record_of(point, PluginState.FAILED, reason, traceback=trial.log.strip())
    record = load(point)
    if trial is None:
        return record
    slow = [phase for phase, seconds in trial.seconds.items() if seconds >= _SLOW_SECONDS]
    words = ", ".join(f"{phase} took {trial.seconds[phase]:.1f} s" for phase in slow)
    return dataclasses.replace(record, slow=words)


def _try_in_copy(
    points: Sequence[importlib.metadata.EntryPoint], env: Mapping[str, str], *, probe: bool
) -> dict[str, Trial]:
    """Load and probe plugins in separate processes; return the trials by entry point.

    The CPU's own plugin is not tried.
    """
    others = [point for point in points if point.name != CPU]
    if not others:
        return {}
    from lmcore.plugin.isolation.fork_trial import can_try, try_each

    if not can_try():
        return {}

    def attempt(point: importlib.metadata.EntryPoint) -> Attempt:
        def load_and_probe(at: Callable[[str], None]) -> Mapping[str, Any]:
            at(f"import of `{point.value}`")
            record = load(point)
            if record.state is not PluginState.USABLE:
                return {}
            for hook in filter(record.implements, _REGISTERING):
                at(f"`{hook}`")
                with suppress(Exception, SystemExit):  # reported when it is called in this process
                    record.call(hook, registry=_NullRegistry())
            if not probe:
                return {}
            at("`lmcore_probe`")
            return probe_as_json(record, env)

        return load_and_probe

    return try_each({point.name: attempt(point) for point in others}, seconds=_TRIAL_SECONDS)


def _taken(name: str, points: Sequence[importlib.metadata.EntryPoint]) -> str:
    owners = " and ".join(sorted(f"`{distribution_of(point)}` ({point.value})" for point in points))
    return f"the name `{name}` is taken twice, by {owners}; uninstall one of them"


def _without_namesakes(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """Fail plugins of different entry points that give themselves one name."""
    checked = []
    for record in records:
        namesakes = [other for other in records if other.info and other.name == record.name]
        if record.info and len(namesakes) > 1:
            owners = " and ".join(
                sorted(f"`{other.distribution}` ({other.entry_point})" for other in namesakes)
            )
            reason = f"two plugins call themselves `{record.name}`, of {owners}; uninstall one"
            checked.append(dataclasses.replace(record, state=PluginState.FAILED, reason=reason))
        else:
            checked.append(record)
    return checked


def _probed(
    record: PluginRecord,
    env: Mapping[str, str],
    tried: Mapping[str, Any] | None,
) -> PluginRecord:
    """Return a usable plugin's record with its probe; a plugin that brings no device has none.

    Args:
        record: A plugin.
        env: The process environment.
        tried: result of its probe in a copy of this process, if it ran there.
    """
    if record.state is not PluginState.USABLE or not record.implements("lmcore_probe"):
        return record
    if not tried:
        tried = probe_as_json(record, env)
    if "probe" in tried:
        return dataclasses.replace(record, probe=Probe.from_dict(tried["probe"]))
    failed = {"reason": tried["reason"], "traceback": tried["traceback"]}
    return dataclasses.replace(record, state=PluginState.FAILED, **failed)
