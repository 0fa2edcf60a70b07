"""Load of one plugin: import, registration of its hooks, `PluginInfo` and probe, each checked.

Failures of any kind end in the plugin's record.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pluggy

from lmcore import hookspecs
from lmcore.base.errors import LmcoreError, PluginError, counted, nearest
from lmcore.contract.probe import API_VERSION, PluginInfo, Probe, ProbeState
from lmcore.plugin.output import stdout_to_stderr
from lmcore.plugin.record import PluginRecord, PluginState, describe, located

__all__ = [
    "distribution_of",
    "is_range",
    "load",
    "new_hook_caller",
    "probe_as_json",
    "record_of",
    "within",
]

_RELEASE = r"\d+(?:\.\d+)*"
_BOUNDS = re.compile(rf"\s*(?:>=|<)\s*{_RELEASE}\s*(?:,\s*(?:>=|<)\s*{_RELEASE}\s*)*", re.ASCII)
_BOUND = re.compile(rf"(>=|<)\s*({_RELEASE})", re.ASCII)
_VERSION = re.compile(rf"({_RELEASE})(?:\+[a-zA-Z0-9.]+)?", re.ASCII)


def is_range(text: str) -> bool:
    """Return True if a text is a version specifier."""
    if _BOUNDS.fullmatch(text):
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True


def within(version: str, specifier: str) -> bool:
    """Return True if the release of a version is within a range.

    Vendors' containers carry pre-releases with a local part ("2.12.0a0+c0ffee"); a range is about
    the release that follows them.

    Args:
        version: Version of an installed package.
        specifier: The range, for which `is_range` is True.
    """
    plain = _VERSION.fullmatch(version)
    if plain and _BOUNDS.fullmatch(specifier):
        release = _numbers(plain[1])
        return all(
            (release >= _numbers(bound)) == (operator == ">=")
            for operator, bound in _BOUND.findall(specifier)
        )
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return SpecifierSet(specifier).contains(Version(version).base_version, prereleases=True)


def _numbers(release: str) -> tuple[int, ...]:
    """Return a release as numbers; 2.0 and 2 are equal."""
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def load(point: importlib.metadata.EntryPoint) -> PluginRecord:
    """Import one plugin, register its hooks and check its `PluginInfo`."""
    try:
        with stdout_to_stderr():
            plugin = point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
        return record_of(
            point,
            PluginState.FAILED,
            f"import of `{point.value}` raised {located(error)}",
            traceback=traceback.format_exc(),
        )
    try:
        hooks = _register(point.name, plugin)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        reason = error.what if isinstance(error, LmcoreError) else describe(error)
        return record_of(point, PluginState.FAILED, reason, traceback=traceback.format_exc())
    record = record_of(point, PluginState.USABLE, hooks=hooks)
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
        returned = f"`lmcore_plugin_info` returned `{type(info).__name__}`, not a `PluginInfo`"
        raise PluginError(f"{returned}: {info!r:.200}")
    wrong = _wrong_info(info)
    if wrong:
        raise PluginError(f"`lmcore_plugin_info` returned an invalid `PluginInfo`: {wrong}")
    return info


def _wrong_info(info: Any) -> str:
    if not isinstance(info.name, str) or not info.name.strip():
        return f"`name` is {info.name!r}, not a name"
    for what, given in (("api", info.api), ("torch", info.torch)):
        if not is_range(str(given)):
            return f"`{what}` is {given!r}, not a version specifier such as `>=1,<2`"
    if not _are_lines(info.provides):
        return f"`provides` is {info.provides!r}, not a tuple of device types"
    if not _are_resources(info.device_resources):
        return (
            f"`device_resources` is {info.device_resources!r}, not a mapping of kinds of jobs to "
            "names without spaces"
        )
    return ""


def _are_lines(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)


def _are_resources(value: Any) -> bool:
    if not isinstance(value, Mapping) or not _are_lines([*value, *value.values()]):
        return False
    return all(one and one.isprintable() and " " not in one for one in value.values())


def _incompatible(info: PluginInfo) -> str:
    """Return why the plugin's ranges exclude this lmcore or torch; empty when they do not."""
    if not within(API_VERSION, str(info.api)):
        return (
            f"it is built for the plugin API {info.api}, and this lmcore has {API_VERSION}; "
            "install matching versions of both"
        )
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    if not within(installed, str(info.torch)):
        return (
            f"it works with torch {info.torch}, and torch {installed} is installed; "
            "install a torch of that range"
        )
    return ""


def probe_as_json(record: PluginRecord, env: Mapping[str, str]) -> dict[str, Any]:
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
        returned = f"`lmcore_probe` returned `{type(probe).__name__}`, not a `Probe`"
        raise PluginError(f"{returned}: {probe!r:.200}")
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
        yield f"it is {probe.state} with {counted(probe.count, 'device')}"
    if not _are_lines(probe.evidence):
        yield f"`evidence` is {probe.evidence!r:.200}, not a tuple of lines"
    if not isinstance(probe.fix, str | None):
        yield f"`fix` is {probe.fix!r:.200}, not text"
    try:
        json.dumps(dict(probe.facts))
    except (TypeError, ValueError) as error:
        yield f"`facts` is no JSON: {error}"


def new_hook_caller() -> pluggy.PluginManager:
    """Return a pluggy manager with lmcore's hooks and no plugin."""
    caller = pluggy.PluginManager(hookspecs.PROJECT)
    caller.add_hookspecs(hookspecs)
    return caller


def record_of(
    point: importlib.metadata.EntryPoint, state: PluginState, reason: str = "", **known: Any
) -> PluginRecord:
    """Return the record of an entry point; *known* are further fields of it."""
    return PluginRecord(
        name=point.name,
        entry_point=point.name,
        distribution=distribution_of(point),
        version=point.dist.version if point.dist is not None else "unknown",
        state=state,
        reason=reason,
        **known,
    )


def distribution_of(point: importlib.metadata.EntryPoint) -> str:
    """Return the name of the package that brings an entry point."""
    return point.dist.name if point.dist is not None else "unknown distribution"
