"""Discovery of plugins: find the installed ones, load each one in isolation, call info and probe.

We load the entry points ourselves: pluggy's loader lets one bad plugin take all others down and
silently drops the second of two with one name.  A copy of this process goes first
(`lmcore.plugin.isolation.fork_trial`), so that a crash in native code or a hanging driver is a
plugin's state like any other.  Loads no torch, and checks everything that a plugin returns.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from lmcore import hookspecs
from lmcore.accelerator.probe import API_VERSION, PluginInfo, Probe, ProbeState
from lmcore.errors import ConfigError, LmcoreError, PluginError, nearest, suggestion
from lmcore.plugin.isolation.fork_trial import Attempt, can_try, try_each
from lmcore.plugin.record import CPU, PluginRecord, PluginSet, PluginState, describe

__all__ = ["ALLOW_LIST", "GROUP", "OFF", "discover", "new_hook_caller"]

GROUP = "lmcore.plugins"
ALLOW_LIST = "LMCORE_PLUGINS"
"""Environment variable: names of the plugins to load beside the CPU's, separated by commas."""

OFF = "LMCORE_PLUGIN_OFF"
"""Environment variable: names of the plugins to leave out, separated by commas."""

_REGISTERING = tuple(name for name in vars(hookspecs) if name.startswith("lmcore_add_"))
"""Hooks that are called in the launcher, where a crash would take the command down."""

_TRIAL_SECONDS = 60.0
"""Until a plugin's import, or its probe, counts as hung: a cold driver may take many seconds."""


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
    points = sorted(entry_points, key=lambda point: (point.name, _distribution(point)))
    sources = dict.fromkeys(_names(env.get(OFF, "")), OFF) | dict.fromkeys(off, "--plugin-off")
    reasons = _left_out(env, sources, [point.name for point in points])
    records: dict[importlib.metadata.EntryPoint, PluginRecord] = {}
    for point in points:
        namesakes = [other for other in points if other.name == point.name and other != point]
        if point.name in reasons:
            records[point] = _record(point, PluginState.OFF, reasons[point.name])
        elif namesakes:
            reason = _taken(point.name, [point, *namesakes])
            records[point] = _record(point, PluginState.FAILED, reason)
    wanted = [point for point in points if point not in records]
    probes = _try_in_copy(wanted, env, probe=probe)
    for point in wanted:
        gone = probes.get(point.name)
        records[point] = gone if isinstance(gone, PluginRecord) else _load(point)
    found = PluginSet(tuple(_without_namesakes([records[point] for point in points])))
    for name, source in sources.items():  # a plugin may call itself otherwise than its entry point
        found = found.without([name], source)
    if not probe:
        return found
    return PluginSet(tuple(_probed(one, env, probes.get(one.entry_point)) for one in found))


def new_hook_caller() -> pluggy.PluginManager:
    """Return a pluggy manager with lmcore's hooks and no plugin."""
    caller = pluggy.PluginManager(hookspecs.PROJECT)
    caller.add_hookspecs(hookspecs)
    return caller


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


def _try_in_copy(
    points: Sequence[importlib.metadata.EntryPoint], env: Mapping[str, str], *, probe: bool
) -> dict[str, PluginRecord | Mapping[str, Any]]:
    """Load and probe plugins in separate processes; the CPU's own plugin in this one.

    Returns:
        By entry point: the record of a plugin that ended its process, or what its probe gave.
    """
    others = [point for point in points if point.name != CPU]
    if not others or not can_try():
        return {}

    def attempt(point: importlib.metadata.EntryPoint) -> Attempt:
        def load_and_probe(at: Callable[[str], None]) -> Mapping[str, Any]:
            at(f"import of `{point.value}`")
            record = _load(point)
            if record.state is not PluginState.USABLE:
                return {}
            for hook in filter(record.implements, _REGISTERING):
                at(f"`{hook}`")
                with suppress(Exception, SystemExit):  # reported when it is called in this process
                    record.call(hook, registry=_NullRegistry())
            if not probe:
                return {}
            at("`lmcore_probe`")
            return _probe_as_json(record, env)

        return load_and_probe

    trials = try_each({one.name: attempt(one) for one in others}, seconds=_TRIAL_SECONDS)
    found: dict[str, PluginRecord | Mapping[str, Any]] = {}
    for point in others:
        trial = trials[point.name]
        if trial.fault:
            reason = f"{trial.phase}: {trial.fault}"
            found[point.name] = _record(
                point, PluginState.FAILED, reason, traceback=trial.log.strip()
            )
        else:
            found[point.name] = trial.answer
    return found


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown distribution"


def _record(
    point: importlib.metadata.EntryPoint, state: PluginState, reason: str = "", **known: Any
) -> PluginRecord:
    return PluginRecord(
        name=point.name,
        entry_point=point.name,
        distribution=_distribution(point),
        version=point.dist.version if point.dist is not None else "unknown",
        state=state,
        reason=reason,
        **known,
    )


def _taken(name: str, points: Sequence[importlib.metadata.EntryPoint]) -> str:
    owners = " and ".join(sorted(f"`{_distribution(one)}` ({one.value})" for one in points))
    return f"the name `{name}` is taken twice, by {owners}; uninstall one of them"


def _load(point: importlib.metadata.EntryPoint) -> PluginRecord:
    """Import one plugin, register its hooks and check its `PluginInfo`."""
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
        return _record(
            point,
            PluginState.FAILED,
            f"import of `{point.value}` raised {describe(error)}",
            traceback=traceback.format_exc(),
        )
    try:
        hooks = _register(point.name, plugin)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        reason = error.what if isinstance(error, LmcoreError) else describe(error)
        return _record(point, PluginState.FAILED, reason, traceback=traceback.format_exc())
    record = _record(point, PluginState.USABLE, hooks=hooks)
    try:
        info = _checked_info(record.call("lmcore_plugin_info"))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
        return _failed(record, error)
    reason = _incompatible(info)
    return dataclasses.replace(
        record,
        name=info.name,
        info=info,
        state=PluginState.REFUSED if reason else PluginState.USABLE,
        reason=reason,
    )


def _failed(record: PluginRecord, error: BaseException) -> PluginRecord:
    reason = describe(error)
    if isinstance(error, LmcoreError):
        reason = error.what_and_why
    return dataclasses.replace(
        record,
        state=PluginState.FAILED,
        reason=reason,
        traceback="".join(traceback.format_exception(error)),
    )


def _register(name: str, plugin: object) -> pluggy.PluginManager:
    """Return a hook caller with *plugin* alone, every implementation checked against its spec.

    Raises:
        PluginError, pluggy.PluginValidationError: An implementation would not be called as its
            author meant it.
    """
    caller = new_hook_caller()
    known = [spec for spec in dir(hookspecs) if spec.startswith(f"{hookspecs.PROJECT}_")]
    for attribute in known:
        function = getattr(plugin, attribute, None)
        if inspect.isroutine(function) and not hasattr(function, f"{hookspecs.PROJECT}_impl"):
            raise PluginError(
                f"`{attribute}` is not marked with `@hookimpl`, so it is never called"
            )
    _check_marked(plugin, known, caller)
    caller.register(plugin, name)
    caller.check_pending()
    for hook in known:
        for one in getattr(caller.hook, hook).get_hookimpls():
            if one.hookwrapper or one.wrapper:
                raise PluginError(
                    f"`{hook}` is a wrapper; a plugin is called alone, so write it plain"
                )
            if one.kwargnames:
                names = "`, `".join(one.kwargnames)
                raise PluginError(
                    f"arguments of `{hook}` have a default and would never be passed: `{names}`"
                )
    if not caller.hook.lmcore_plugin_info.get_hookimpls():
        raise PluginError("it has no `lmcore_plugin_info`, the one hook that every plugin needs")
    return caller


def _check_marked(plugin: object, known: Sequence[str], caller: pluggy.PluginManager) -> None:
    """Check names and arguments of the marked functions.

    Raises:
        PluginError: A name or an argument is not in `lmcore.hookspecs`.
    """
    for attribute in dir(plugin):
        function = getattr(plugin, attribute, None)
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if not inspect.isroutine(function) or not isinstance(options, dict):
            continue
        hook = options.get("specname") or attribute
        if hook not in known:
            close = nearest(hook, known)
            meant = f"; did you mean `{close}`?" if close else ""
            raise PluginError(f"`{hook}` is not a hook of plugin API {API_VERSION}{meant}")
        arguments = getattr(caller.hook, hook).spec.argnames
        for argument, parameter in inspect.signature(function).parameters.items():
            required = parameter.default is parameter.empty
            if required and argument not in arguments:
                allowed = ", ".join(f"`{one}`" for one in arguments) or "none"
                raise PluginError(
                    f"`{hook}` has no argument `{argument}`; its arguments: {allowed}"
                )


def _checked_info(info: object) -> PluginInfo:
    """Return *info* if it is a `PluginInfo` with fields of the right types."""
    if not isinstance(info, PluginInfo):
        raise PluginError(f"`lmcore_plugin_info` returned {info!r:.200}, not a `PluginInfo`")
    wrong = _wrong_info(info)
    if wrong:
        raise PluginError(f"`lmcore_plugin_info` returned an invalid `PluginInfo`: {wrong}")
    return info


def _wrong_info(info: Any) -> str:
    if not isinstance(info.name, str) or not info.name.strip():
        return f"`name` is {info.name!r}, not a name"
    for what, given in (("api", info.api), ("torch", info.torch)):
        try:
            SpecifierSet(str(given))
        except InvalidSpecifier:
            return f"`{what}` is {given!r}, not a version specifier such as `>=1,<2`"
    if not _are_lines(info.provides):
        return f"`provides` is {info.provides!r}, not a tuple of device types"
    return ""


def _are_lines(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)


def _incompatible(info: PluginInfo) -> str:
    """Return why the plugin's ranges exclude this lmcore or torch; empty when they do not."""
    if not SpecifierSet(str(info.api)).contains(API_VERSION, prereleases=True):
        return (
            f"it is built for the plugin API {info.api}, and this lmcore has {API_VERSION}; "
            "install matching versions of both"
        )
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    # Vendors' containers carry pre-releases with a local part ("2.12.0a0+c0ffee"); a range speaks
    # of the release that they are going to be.
    if not SpecifierSet(str(info.torch)).contains(
        Version(installed).base_version, prereleases=True
    ):
        return f"it works with torch {info.torch}, and torch {installed} is installed"
    return ""


def _without_namesakes(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """Fail plugins of different entry points that give themselves one name."""
    checked = []
    for record in records:
        namesakes = [one for one in records if one.info and one.name == record.name]
        if record.info and len(namesakes) > 1:
            owners = " and ".join(
                sorted(f"`{one.distribution}` ({one.entry_point})" for one in namesakes)
            )
            reason = f"two plugins call themselves `{record.name}`, of {owners}; uninstall one"
            checked.append(dataclasses.replace(record, state=PluginState.FAILED, reason=reason))
        else:
            checked.append(record)
    return checked


def _probed(
    record: PluginRecord,
    env: Mapping[str, str],
    tried: PluginRecord | Mapping[str, Any] | None,
) -> PluginRecord:
    """Return a usable plugin's record with its probe; a plugin that brings no device has none.

    Args:
        record: A plugin.
        env: The process environment.
        tried: result of its probe in a copy of this process, if it ran there.
    """
    if record.state is not PluginState.USABLE or not record.implements("lmcore_probe"):
        return record
    if not isinstance(tried, Mapping) or not tried:
        tried = _probe_as_json(record, env)
    if "probe" in tried:
        return dataclasses.replace(record, probe=Probe.from_dict(tried["probe"]))
    failed = {"reason": tried["reason"], "traceback": tried["traceback"]}
    return dataclasses.replace(record, state=PluginState.FAILED, **failed)


def _probe_as_json(record: PluginRecord, env: Mapping[str, str]) -> dict[str, Any]:
    """Call a usable plugin's probe; return the result, or the failure, as JSON values."""
    if not record.implements("lmcore_probe"):
        return {}
    try:
        return {"probe": _checked_probe(record.call("lmcore_probe", env=dict(env))).to_dict()}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
        failed = _failed(record, error)
        return {"reason": failed.reason, "traceback": failed.traceback}


def _checked_probe(probe: object) -> Probe:
    """Return *probe* if it is a `Probe` with fields of the right types."""
    if not isinstance(probe, Probe):
        raise PluginError(f"`lmcore_probe` returned {probe!r:.200}, not a `Probe`")
    wrong = next(_faults(probe), "")
    if wrong:
        raise PluginError(f"`lmcore_probe` returned an invalid `Probe`: {wrong}")
    return probe


def _faults(probe: Any) -> Iterator[str]:
    """Yield the problems; a later check may rely on the earlier ones."""
    if not isinstance(probe.device_type, str) or not probe.device_type.strip():
        yield f"`device_type` is {probe.device_type!r}, not a device type"
    if not isinstance(probe.state, ProbeState):
        yield f"`state` is {probe.state!r}, not a `ProbeState`"
    if not isinstance(probe.count, int) or not isinstance(probe.priority, int):
        yield f"`count` {probe.count!r} and `priority` {probe.priority!r} are not both integers"
    counts = {ProbeState.PRESENT: probe.count > 0, ProbeState.ABSENT: probe.count == 0}
    if not counts.get(probe.state, probe.count >= 0):
        yield f"it is {probe.state} with {probe.count} devices"
    if not _are_lines(probe.evidence):
        yield f"`evidence` is {probe.evidence!r:.200}, not a tuple of lines"
    if not isinstance(probe.fix, str | None):
        yield f"`fix` is {probe.fix!r:.200}, not text"
    try:
        json.dumps(dict(probe.facts))
    except (TypeError, ValueError) as error:
        yield f"`facts` is no JSON: {error}"
