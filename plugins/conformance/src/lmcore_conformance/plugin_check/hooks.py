"""Mistakes in a plugin's hooks: names and arguments that a version of the contract lacks.

Part of `lmcore plugin check`.  Reads the functions of a loaded plugin and calls none of them.
pluggy refuses a plugin at its first mistake; this names all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from packaging.version import Version

from lmcore import hookspecs
from lmcore.base.errors import counted, nearest
from lmcore.contract.probe import Check, CheckStatus
from lmcore.plugin.record import PluginRecord
from lmcore_conformance.contract.snapshot import specified_hooks

__all__ = ["Implementation", "check_hooks", "implementations", "place_of"]

_PREFIX = f"{hookspecs.PROJECT}_"
_MARK = f"{hookspecs.PROJECT}_impl"

Described = Mapping[str, Any]


@dataclass(frozen=True)
class Implementation:
    """A function of a plugin that is a hook, or looks like one.

    Attributes:
        hook: Name of the hook: the mark's, or else the function's.
        function: The function.
        mark: the mark of `hookimpl`; None if the function is not marked.
    """

    hook: str
    function: Callable[..., Any]
    mark: Mapping[str, Any] | None


def implementations(plugin: object) -> list[Implementation]:
    """Return what of a plugin is marked as a hook or named like one."""
    found = []
    for name in dir(plugin):
        function = getattr(plugin, name, None)
        if not inspect.isroutine(function):
            continue
        mark = getattr(function, _MARK, None)
        if mark is not None:
            found.append(Implementation(mark.get("specname") or name, function, mark))
        elif name.startswith(_PREFIX):
            found.append(Implementation(name, function, None))
    return found


def place_of(record: PluginRecord, hook: str) -> str:
    """Return file and line of a plugin's hook: "guest_plugin.py, line 12".

    Args:
        record: The plugin.
        hook: Name of a hook that it implements.
    """
    assert record.hooks is not None
    (implementation,) = getattr(record.hooks.hook, hook).get_hookimpls()
    code = inspect.unwrap(implementation.function).__code__
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


def check_hooks(plugin: object, contract: Described) -> Iterator[Check]:
    """Yield a check for each mistake in the hooks of *plugin*, and a line on the right ones.

    Args:
        plugin: module that the entry point loads.
        contract: The version of the contract that it is held against.
    """
    right = []
    for implementation in implementations(plugin):
        problems = list(_problems(implementation, contract))
        yield from problems
        if implementation.mark is not None and not problems:
            right.append(implementation.hook)
    if right:
        count = counted(len(right), "hook")
        detail = f"{count} as version {contract['api']} of the contract specifies"
        yield Check("hooks", CheckStatus.OK, detail)
    marked = {
        implementation.hook
        for implementation in implementations(plugin)
        if implementation.mark is not None
    }
    yield from _missing(marked, contract["api"])


def _failed(hook: str, detail: str, fix: str | None = None) -> Check:
    return Check(hook, CheckStatus.FAILED, detail, fix)


def _problems(implementation: Implementation, contract: Described) -> Iterator[Check]:
    """Yield the reasons why a function is not called, or not as intended."""
    hooks = contract["hooks"]
    if implementation.hook not in hooks:
        yield from _unknown(implementation, contract)
    elif implementation.mark is None:
        yield _failed(
            implementation.hook,
            "it is not marked with `@hookimpl`, so it is never called",
            "mark it: `from lmcore.hookspecs import hookimpl`",
        )
    else:
        yield from _kind_problems(implementation)
        yield from _argument_problems(
            implementation, hooks[implementation.hook]["arguments"], contract["api"]
        )


def _unknown(implementation: Implementation, contract: Described) -> Iterator[Check]:
    close = _nearest_hook(implementation.hook, contract["hooks"])
    version = contract["api"]
    if implementation.hook in specified_hooks():
        detail = f"version {version} of the contract does not have this hook; it came later"
        yield _failed(
            implementation.hook, detail, f"leave it out, or ask for more than api {version}"
        )
    elif implementation.mark is not None or close is not None:
        detail = f"version {version} of the contract has no such hook"
        fix = f"did you mean `{close}`?" if close else "remove the mark, or the function"
        yield _failed(implementation.hook, detail, fix)
    else:
        yield Check(
            implementation.hook,
            CheckStatus.WARNING,
            f"a function that is no hook has the hooks' prefix `{_PREFIX}`",
            "give it another name, so that no later hook takes it",
        )


def _nearest_hook(name: str, hooks: Iterable[str]) -> str | None:
    """Return the intended hook; the common prefix is not compared."""
    close = nearest(name.removeprefix(_PREFIX), [hook.removeprefix(_PREFIX) for hook in hooks])
    return f"{_PREFIX}{close}" if close else None


def _kind_problems(implementation: Implementation) -> Iterator[Check]:
    mark = implementation.mark or {}
    if mark.get("hookwrapper") or mark.get("wrapper"):
        yield _failed(
            implementation.hook, "it is a wrapper; a plugin is called alone, so write it plain"
        )
    elif inspect.isgeneratorfunction(implementation.function):
        yield _failed(
            implementation.hook, "it is a generator; a hook returns what it offers, as a list"
        )
    elif inspect.iscoroutinefunction(implementation.function):
        yield _failed(implementation.hook, "it is `async`; a hook is called plainly")


def _argument_problems(
    implementation: Implementation, known: Described, version: str
) -> Iterator[Check]:
    for name, parameter in inspect.signature(implementation.function).parameters.items():
        if parameter.kind in {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
            yield _failed(
                implementation.hook, f"its `{parameter}` never gets anything; name what it takes"
            )
        elif name not in known:
            close = nearest(name, known)
            takes = ", ".join(f"`{argument}`" for argument in known) or "none"
            yield _failed(
                implementation.hook,
                f"in version {version} it has no argument `{name}`; its arguments: {takes}",
                f"did you mean `{close}`?" if close else None,
            )
        elif parameter.default is not Parameter.empty:
            yield _failed(
                implementation.hook, f"argument `{name}` has a default, so it is never passed"
            )
        elif parameter.kind is Parameter.KEYWORD_ONLY:
            yield _failed(
                implementation.hook, f"argument `{name}` comes after `*`, so it is never passed"
            )


def _missing(marked: set[str], version: str) -> Iterator[Check]:
    """Yield the hooks that the plugin lacks."""
    if "lmcore_plugin_info" not in marked:
        yield _failed("lmcore_plugin_info", "it is missing; it is the one that every plugin needs")
    if "lmcore_create_device" in marked and "lmcore_probe" not in marked:
        yield _failed("lmcore_probe", "it is missing, so the device can never be chosen")
    if "lmcore_probe" not in marked:
        return
    if "lmcore_create_device" not in marked:
        detail = "it is missing, so a device that is present cannot be created"
        yield _failed("lmcore_create_device", detail)
    if Version(version) >= Version("1.1"):  # the core has defaults for the others
        return
    for hook, why in (
        ("lmcore_precision_policies", "no run can start on the device without a precision"),
        ("lmcore_recompute_policies", "no run can start without the policy `none`"),
    ):
        if hook not in marked:
            yield _failed(hook, f"it is missing, and version {version} has no default: {why}")
    if "lmcore_comm_backends" not in marked:
        detail = f"it is missing, and version {version} has no default: runs have one process"
        yield Check("lmcore_comm_backends", CheckStatus.WARNING, detail)
