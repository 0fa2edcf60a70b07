"""Cost of a plugin that is installed: every command of lmcore imports, probes and discovers it.

Part of `lmcore plugin check`.  The functions run in fresh processes and yield checks
as JSON values; `lines` calls them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lmcore import hookspecs
from lmcore.base.errors import counted
from lmcore.contract.probe import Check, CheckStatus
from lmcore.plugin.discovery import GROUP
from lmcore_conformance.plugin_check.effects import Effect, Effects
from lmcore_conformance.plugin_check.traces import Clock

__all__ = ["DISCOVERY", "LAUNCHER", "entry_point", "watch_discovery", "watch_launcher"]

LAUNCHER = ("import time", "import effects", "launcher hooks", "probe effects")
"""Lines of `watch_launcher`."""

DISCOVERY = ("discovery",)
"""Line of `watch_discovery`."""

_SECONDS = 0.5
"""Time that the import may take, and the hooks that every command calls."""

_PROBE_SECONDS = 2.0

_TRIES = 2
"""Number of times that a hook is called: a slow answer may be the machine's."""

_HEAVY = {"numpy", "pandas", "scipy", "torch"}
_PROBE = "lmcore_probe"
_CALLED = (
    "lmcore_plugin_info",
    *(name for name in vars(hookspecs) if name.startswith("lmcore_add_")),
)


def entry_point(name: str, distribution: str) -> importlib.metadata.EntryPoint:
    """Return the entry point of a plugin, also if another package brings one of its name."""
    (point,) = (
        point
        for point in importlib.metadata.entry_points(group=GROUP, name=name)
        if point.dist is not None and point.dist.name == distribution
    )
    return point


def watch_launcher(name: str, distribution: str, patience: float) -> Iterator[dict[str, Any]]:
    """Import a plugin, call the hooks that every command calls, and yield the checks of `LAUNCHER`.

    Args:
        name: Its entry point.
        distribution: The package that brings it.
        patience: Factor on the time limits.
    """
    import lmcore.contract  # noqa: F401  # what every plugin needs is not its own cost
    from lmcore.plugin.load import new_hook_caller

    caller = new_hook_caller()
    point = entry_point(name, distribution)
    effects = Effects(point, in_launcher=True)
    effects.begin_functions()
    modules, clock = set(sys.modules), Clock()
    plugin = point.load()
    effects.end_copy()
    yield _import_time(set(sys.modules) - modules, clock.seconds(), clock.busy(), patience)
    yield from _effects(
        "import effects", [*effects.found(), *effects.replaced()], "the process is as it was"
    )
    caller.register(plugin, name)
    hooks = [hook for hook in _CALLED if getattr(caller.hook, hook).get_hookimpls()]

    def call() -> None:
        for hook in hooks:
            arguments = {} if hook == "lmcore_plugin_info" else {"registry": _NullRegistry()}
            with contextlib.suppress(Exception):  # reported by the check of the hook
                getattr(caller.hook, hook)(**arguments)

    effects.begin()
    effects.begin_functions()
    seconds = _least(call)
    slow = [] if seconds <= _SECONDS * patience else [Effect(_took(seconds, _SECONDS * patience))]
    shown = f"{', '.join(hooks)}: {seconds * 1e3:.0f} ms, and the process is as it was"
    yield from _effects("launcher hooks", [*slow, *effects.found(), *effects.replaced()], shown)
    if getattr(caller.hook, _PROBE).get_hookimpls():
        yield from _probe(caller.hook.lmcore_probe, effects, _PROBE_SECONDS * patience)
    else:
        yield _line(Check("probe effects", CheckStatus.OK, f"it has no `{_PROBE}`, and no device"))


def _import_time(
    modules: Iterable[str], seconds: float, busy: float, patience: float
) -> dict[str, Any]:
    """Return the check of the time that the import took."""
    loaded = list(modules)
    heavy = sorted({name.partition(".")[0] for name in loaded} & _HEAVY)
    limit = _SECONDS * patience
    but = f", with {', '.join(heavy)}" if heavy else ""
    if max(seconds, busy) <= limit:
        detail = f"{seconds * 1e3:.0f} ms, {counted(len(loaded), 'module')}{but}"
        return _line(Check("import time", CheckStatus.OK, detail))
    if seconds - busy > busy:
        but += f"; it waits for {seconds - busy:.2f} s of this time, as in a sleep or a read"
    detail = f"the import takes {_took(max(seconds, busy), limit)}{but}"
    fix = "do the work in the hook that needs it; every command of lmcore imports the plugin"
    return _line(Check("import time", CheckStatus.FAILED, detail, fix))


def _took(seconds: float, limit: float) -> str:
    return f"{seconds:.2f} s, and the limit is {limit:g} s"


def _probe(probe: Callable[..., Any], effects: Effects, limit: float) -> Iterator[dict[str, Any]]:
    """Yield the checks of a probe that is called twice."""
    found: list[Any] = []
    effects.begin()
    effects.begin_functions()
    seconds = _least(lambda: found.extend(probe(env=dict(os.environ))))
    faults = [*effects.found(), *effects.replaced()]
    if "torch" in sys.modules:
        faults.append(Effect("it imports torch"))
    if seconds > limit:
        faults.append(Effect(f"it takes {_took(seconds, limit)}"))
    seen = {json.dumps([p.device_type, str(p.state), p.count, p.priority]) for p in found}
    if len(seen) > 1:
        faults.append(Effect("two probes describe the device differently"))
    shown = f"{seconds * 1e3:.0f} ms, and the process is as it was"
    yield from _effects("probe effects", faults, shown)


def _least(call: Callable[[], None]) -> float:
    """Return the shorter time of two calls."""
    times: list[float] = []
    for _ in range(_TRIES):
        clock = Clock()
        call()
        times.append(clock.seconds())
    return min(times)


def watch_discovery(name: str, distribution: str) -> Iterator[dict[str, Any]]:
    """Discover a plugin twice in a process that has torch, and yield the check of `DISCOVERY`."""
    with contextlib.suppress(Exception):  # a torch that cannot be imported fails elsewhere
        import torch  # noqa: F401  # a worker may have it when it discovers plugins

    effects = Effects(entry_point(name, distribution), in_launcher=False)
    effects.begin_functions("torch")
    found = [_registered(name) for _ in range(2)]
    first, second = found
    faults = [Effect(found["state"]) for found in (first, second) if "state" in found][:1]
    if not faults:
        differing = [part for part in first if first[part] != second[part]]
        faults = [Effect(f"{part} differs the second time") for part in differing]
    effects.end_copy()
    changed = [*effects.torch_settings(), *effects.replaced()]
    faults += [Effect(f"where torch is loaded already, {one.text}") for one in changed]
    shown = f"the same a second time: {', '.join(first)}"
    yield from _effects(DISCOVERY[0], faults, shown)


def _registered(name: str) -> dict[str, Any]:
    """Return what a plugin registers when it is discovered in this process."""
    from lmcore.plugin import discover
    from lmcore.plugin.registrations import (
        plugin_commands,
        plugin_corpora,
        plugin_sections,
        registered_types,
    )

    plugins = discover()
    record = next(plugin for plugin in plugins if plugin.entry_point == name)
    if record.info is None or record.reason:
        return {"state": record.reason}
    probe = record.probe
    return {
        "info": repr(record.info),
        "settings": list(plugin_sections(plugins).options),
        "commands": list(plugin_commands(plugins, {})),
        "texts": list(plugin_corpora(plugins, {})),
        "tokenizers": list(registered_types(plugins)),
        **({"probe": json.dumps([probe.device_type, str(probe.state)])} if probe else {}),
    }


class _NullRegistry:
    """Registry that takes everything and keeps nothing."""

    def add(self, *_: Any, **__: Any) -> None:
        """Take what a plugin adds."""


def _effects(title: str, effects: Iterable[Effect], good: str) -> Iterator[dict[str, Any]]:
    """Yield a check for each effect, or that there is none."""
    found = list(effects)
    for effect in found:
        status = CheckStatus.FAILED if effect.is_fault else CheckStatus.WARNING
        yield _line(Check(title, status, effect.text))
    if not any(effect.is_fault for effect in found):
        yield _line(Check(title, CheckStatus.OK, good))


def _line(check: Check) -> dict[str, Any]:
    return {"check": dataclasses.asdict(check)}
