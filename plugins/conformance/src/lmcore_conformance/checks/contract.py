"""Level 0: the plugin keeps the contract, and finding it out costs nothing.

Some checks sort the lines of `lmcore plugin check`; the other checks watch the plugin
being imported and probed in a fresh process.  Nothing here loads torch into the process of a check.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

from lmcore.accelerator.probe import API_VERSION, CheckStatus
from lmcore.accelerator.probe import Check as Line
from lmcore.errors import counted
from lmcore.plugin.discovery import GROUP
from lmcore.plugin.isolation.subprocess_call import HUNG, call_isolated
from lmcore_conformance.plugin_check.registrations import reserved_names
from lmcore_conformance.plugin_check.trial import read_steps
from lmcore_conformance.process.watchdog import SILENCE
from lmcore_conformance.registry import Failure, NotRun, check

__all__ = ["ContractBench", "open_devices", "watch_import", "watch_probe", "watch_registration"]

_check = partial(check, level="L0", group="contract")
_IMPORT_SECONDS = 0.5
_PROBE_SECONDS = 5.0
_HARMLESS = ("/dev/null", "/dev/pts/", "/dev/tty", "/dev/urandom", "/dev/random", "/dev/shm/")  # noqa: S108
_SELF = "lmcore_conformance.checks.contract"
_RECORDS = ("import", "source", "hooks", "lmcore_plugin_info", "lmcore_probe")


class ContractBench:
    """The plugins by their entry points, and the findings of `lmcore plugin check`."""

    def __init__(self, entry_points: Sequence[str], patience: float = 1.0) -> None:
        """Take the names of the plugins' entry points, and the factor on time limits."""
        self.entry_points = tuple(entry_points)
        self.patience = patience

    @cached_property
    def lines(self) -> list[Line]:
        """Lines of the check of the contract, with the steps that it did not reach."""
        return [line for name in self.entry_points for line in self._lines_of(name)]

    def _lines_of(self, name: str) -> Iterator[Line]:
        point = next(iter(importlib.metadata.entry_points(group=GROUP, name=name)))
        assert point.dist is not None
        arguments = (name, point.dist.name, API_VERSION, reserved_names(), False)
        outcome = call_isolated(
            "lmcore_conformance.plugin_check.trial:check_plugin",
            *(*arguments, self.patience * SILENCE),
            timeout=100.0 * self.patience,
        )
        for line in read_steps(outcome.values, outcome.fault):
            yield dataclasses.replace(line, detail=f"{self._prefix(name)}{line.detail}")

    def _prefix(self, name: str) -> str:
        return f"plugin `{name}`: " if len(self.entry_points) > 1 else ""

    def judge(self, names: tuple[str, ...] | None, *, prefix: str = "") -> str:
        """Return the summary of the lines with these names.

        Args:
            names: names of steps; None: all that no other check judges.
            prefix: prefix of further names.

        Raises:
            Failure: Some of them say that something is wrong.
            NotRun: All were skipped.
        """
        matching = [line for line in self.lines if self._belongs(line.name, names, prefix)]
        if not matching and names == ("lmcore_probe",):
            raise NotRun("the plugin has no such hook")
        wrong = [line for line in matching if line.status is CheckStatus.FAILED]
        if wrong:
            raise Failure(*(f"{line.name}: {line.detail}" for line in wrong))
        if matching and all(line.status is CheckStatus.SKIPPED for line in matching):
            raise NotRun(matching[0].detail)
        warned = [
            f"{line.name}: {line.detail}" for line in matching if line.status is CheckStatus.WARNING
        ]
        return "; ".join(warned) or f"{counted(len(matching), 'line')} of `lmcore plugin check`"

    def _belongs(self, name: str, names: tuple[str, ...] | None, prefix: str) -> bool:
        if names is not None:
            return name in names or (bool(prefix) and name.startswith(prefix))
        return name not in _RECORDS and not name.startswith("lmcore_add_")

    def watch(self, function: str, judge: Callable[[Any], tuple[str, list[str]]]) -> str:
        """Return the findings of a function of this module, called in a fresh process per plugin.

        Args:
            function: Its name; it takes an entry point, and returns None if it does not apply.
            judge: Returns a line about its result, and the faults.

        Raises:
            Failure: It found a fault, crashed, hung or raised.
            NotRun: It applies to no plugin, or the plugin is known to hang.
        """
        hung = [line.name for line in self.lines if HUNG in line.detail]
        if hung:
            raise NotRun(f"not reached: `{hung[0]}` hung")
        lines, faults = [], []
        for name in self.entry_points:
            outcome = call_isolated(f"{_SELF}:{function}", name, timeout=30.0 * self.patience)
            if outcome.complete and outcome.value is None:
                continue
            line, wrong = judge(outcome.value) if outcome.complete else ("", [outcome.fault])
            lines.append(f"{self._prefix(name)}{line}")
            faults += [f"{self._prefix(name)}{fault}" for fault in wrong]
        if faults:
            raise Failure(*faults)
        if not lines:
            raise NotRun("the plugin has no such hook")
        return "; ".join(lines)


@_check(
    "contract.import",
    "The plugin's module can be imported, without torch.",
    reason="`lmcore plugins` and every launcher import it; torch takes seconds.",
    seconds=120,
)
def import_(bench: ContractBench) -> str:
    """Judge the import."""
    return bench.judge(("import",))


@_check(
    "contract.source",
    "It imports only names of the contract from lmcore.",
    reason="Other names may change in any release.",
    seconds=120,
)
def source(bench: ContractBench) -> str:
    """Judge the imports of the source files."""
    return bench.judge(("source",))


@_check(
    "contract.hooks",
    "Its hooks match the contract: names, marks and arguments; hooks that belong together are "
    "present.",
    reason="A hook with another name or argument is not called as intended.",
    seconds=120,
)
def hooks(bench: ContractBench) -> str:
    """Judge the hooks' signatures."""
    return bench.judge(("hooks", "lmcore_plugin_info"))


@_check(
    "contract.probe",
    "`lmcore_probe` returns a valid `Probe`, and does not import torch.",
    reason="It runs in the launcher of every command, for every installed plugin.",
    seconds=120,
)
def probe(bench: ContractBench) -> str:
    """Judge the probe."""
    return bench.judge(("lmcore_probe",))


@_check(
    "contract.registrations",
    "Its settings, commands, texts and tokenizers can be registered and found.",
    reason="A name that is in use, or a missing file, fails the user's command.",
    seconds=120,
)
def registrations(bench: ContractBench) -> str:
    """Judge the plugin's registrations."""
    return bench.judge((), prefix="lmcore_add_")


@_check(
    "contract.offers",
    "The device can be created, and the other hooks return what the contract requires.",
    reason="A run uses kernels, policies and backends without a further check.",
    seconds=120,
)
def offers(bench: ContractBench) -> str:
    """Judge the hooks that are about a device; without one most of them cannot be called."""
    found = bench.judge(None)
    for line in bench.lines:
        if line.name == "lmcore_create_device" and line.status is CheckStatus.SKIPPED:
            raise NotRun(line.detail)
    return found


@_check(
    "contract.import-time",
    f"Importing the plugin takes less than {_IMPORT_SECONDS:g} s of processor time.",
    reason="Every command of lmcore pays for it, also those that do not use the device.",
)
def import_time(bench: ContractBench) -> str:
    """Measure the import in a process that has lmcore's contract loaded."""

    def judge(found: Any) -> tuple[str, list[str]]:
        heavy = f", with {', '.join(found['heavy'])}" if found["heavy"] else ""
        slow = found["seconds"] > _IMPORT_SECONDS
        faults = [f"it takes {found['seconds']:.2f} s{heavy}"] if slow else []
        modules = counted(found["modules"], "module")
        return f"{found['seconds'] * 1e3:.0f} ms, {modules}{heavy}", faults

    return bench.watch("watch_import", judge)


@_check(
    "contract.probe-initialises-nothing",
    "The probe does not change the process: no torch, no open device, no thread, no variable.",
    reason="A device context of the launcher may lock out the workers, and a process that has "
    "initialised a driver cannot be forked.",
)
def probe_initialises_nothing(bench: ContractBench) -> str:
    """Compare a fresh process before and after two probes."""

    def judge(found: Any) -> tuple[str, list[str]]:
        faults = []
        if found["torch"]:
            faults.append("torch is imported")
        faults += [f"`{path}` stays open" for path in found["opened"]]
        faults += [f"the environment variable `{name}` is changed" for name in found["variables"]]
        if found["threads"] > 0:
            verb = "stays" if found["threads"] == 1 else "stay"
            faults.append(f"{counted(found['threads'], 'thread')} {verb}")
        if found["seconds"] > _PROBE_SECONDS:
            faults.append(f"it takes {found['seconds']:.1f} s")
        if not found["same"]:
            faults.append("two probes describe the device differently")
        return f"{found['seconds'] * 1e3:.0f} ms", faults

    return bench.watch("watch_probe", judge)


@_check(
    "contract.idempotent",
    "The plugin registers and returns the same if a process discovers it twice.",
    reason="A launcher discovers plugins for its flags, for the device selection and for its "
    "workers.",
)
def idempotent(bench: ContractBench) -> str:
    """Compare two discoveries in one fresh process."""

    def judge(found: Any) -> tuple[str, list[str]]:
        if found["problem"]:
            return "", [found["problem"]]
        pairs = found["pairs"].items()
        differing = [name for name, (first, other) in pairs if first != other]
        faults = [f"{name} differs the second time" for name in differing]
        return ", ".join(found["pairs"]), faults

    return bench.watch("watch_registration", judge)


def _load(entry_point: str) -> Any:
    (point,) = importlib.metadata.entry_points(group=GROUP, name=entry_point)
    return point.load()


def watch_import(entry_point: str) -> dict[str, Any]:
    """Return processor time and modules of a plugin's import; in a fresh process."""
    import lmcore.accelerator
    import lmcore.hookspecs  # noqa: F401  # what every plugin needs is not its own cost

    before, begin = set(sys.modules), time.process_time()
    _load(entry_point)
    seconds = time.process_time() - begin
    new = set(sys.modules) - before
    heavy = sorted({name.partition(".")[0] for name in new} & {"numpy", "pandas", "scipy", "torch"})
    return {"seconds": seconds, "modules": len(new), "heavy": heavy}


def watch_probe(entry_point: str) -> dict[str, Any] | None:
    """Return the traces that a probe leaves in a fresh process; None if the plugin has none."""
    from lmcore.plugin.load import new_hook_caller

    caller = new_hook_caller()
    caller.register(_load(entry_point), entry_point)
    if not caller.hook.lmcore_probe.get_hookimpls():
        return None
    opened, variables, threads = open_devices(), dict(os.environ), _threads()
    begin = time.perf_counter()
    (first,) = caller.hook.lmcore_probe(env=dict(os.environ))
    seconds = time.perf_counter() - begin
    (second,) = caller.hook.lmcore_probe(env=dict(os.environ))
    now = dict(os.environ)
    return {
        "torch": "torch" in sys.modules,
        "opened": sorted(open_devices() - opened),
        "variables": sorted(
            name for name in variables.keys() | now if variables.get(name) != now.get(name)
        ),
        "threads": _threads() - threads,
        "seconds": seconds,
        "same": (first.device_type, first.state, first.count, first.priority)
        == (second.device_type, second.state, second.count, second.priority),
    }


def watch_registration(entry_point: str) -> dict[str, Any]:
    """Return the registrations of a plugin that is discovered twice in a fresh process."""
    from lmcore.plugin import discover
    from lmcore.plugin.registrations import (
        plugin_commands,
        plugin_corpora,
        plugin_sections,
        registered_types,
    )

    found = []
    for _ in range(2):
        plugins = discover()
        record = next(plugin for plugin in plugins if plugin.entry_point == entry_point)
        if record.info is None or record.reason:
            return {"problem": record.reason, "pairs": {}}
        probe = record.probe
        found.append(
            {
                "info": repr(record.info),
                "settings": list(plugin_sections(plugins).options),
                "commands": list(plugin_commands(plugins, {})),
                "texts": list(plugin_corpora(plugins, {})),
                "tokenizers": list(registered_types(plugins)),
                **({"probe": json.dumps([probe.device_type, str(probe.state)])} if probe else {}),
            }
        )
    pairs = {name: (found[0][name], found[1][name]) for name in found[0]}
    return {"problem": "", "pairs": pairs}


def open_devices() -> set[str]:
    """Return the devices that this process has open."""
    links = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the folder's own descriptor vanishes
        try:
            links.add(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115 - the same
        except OSError:
            continue
    return {link for link in links if link.startswith("/dev/") and not link.startswith(_HARMLESS)}


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only counted
    except OSError:
        return threading.active_count()
