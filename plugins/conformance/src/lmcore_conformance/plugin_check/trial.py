"""The process in which `lmcore plugin check` tries one plugin, step by step.

`check_plugin` loads the plugin as a run would, calls its hooks, and yields what it finds; the
command, in another process, reads it (`read_steps`), so that a native crash or a hang is a finding
too.  Torch is loaded by the plugin when its device is created, and not before.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lmcore.base.errors import LmcoreError, counted
from lmcore.contract.probe import API_VERSION, Check, CheckStatus, PluginInfo, ProbeState
from lmcore.plugin.discovery import ALLOW_LIST, GROUP, OFF, discover
from lmcore.plugin.hook_calls import DEFAULT_OFFERS
from lmcore.plugin.record import CPU, PluginRecord, PluginState, located
from lmcore_conformance.contract.snapshot import contract_versions, load_contract
from lmcore_conformance.plugin_check.device import DEVICE_CHECKS, Bench
from lmcore_conformance.plugin_check.effects import Effect, Effects
from lmcore_conformance.plugin_check.hooks import check_hooks, implementations
from lmcore_conformance.plugin_check.import_watch import ImportWatch
from lmcore_conformance.plugin_check.launcher_cost import entry_point
from lmcore_conformance.plugin_check.records import field_problems, resource_problems
from lmcore_conformance.plugin_check.registrations import REGISTRATION_CHECKS
from lmcore_conformance.plugin_check.source import check_imports, check_source
from lmcore_conformance.process.watchdog import SILENCE, watched

__all__ = ["EFFECTS", "HOOKS_FIRST", "check_plugin", "plugin_names", "read_steps"]

HOOKS_FIRST = "its hooks have to be right first"
"""Reason why the hooks of a plugin are not called."""

EFFECTS = "hook effects"
"""Line about what the hooks of a device change."""

_LAUNCH = "lmcore_launch_env"
"""The hook of the device that the launcher calls."""

_NOTHING_TAKEN: Mapping[str, Sequence[str]] = MappingProxyType({})


def plugin_names() -> dict[str, str]:
    """Return the entry point of each plugin that loads, by the name that it gives itself."""
    plugins = discover(env=_environment(), probe=False)
    return {plugin.name: plugin.entry_point for plugin in plugins if plugin.info is not None}


def check_plugin(
    name: str,
    distribution: str,
    against: str,
    taken: Mapping[str, Sequence[str]] = _NOTHING_TAKEN,
    allow_private: bool = False,  # noqa: FBT001, FBT002 - passed by position to another process
    silence: float = SILENCE,
) -> Iterator[dict[str, Any]]:
    """Try a plugin and yield the findings, in JSON values that `read_steps` understands.

    Args:
        name: Its entry point.
        distribution: The package that brings it.
        against: Version of the contract.
        taken: the core's names by "commands", "corpora" and "tokenizers".
        allow_private: True if private names of lmcore are warnings, not failures.
        silence: Seconds without progress after which the process ends itself.
    """
    point = entry_point(name, distribution)
    trial = _Trial(point, load_contract(against), taken, allow_private=allow_private)
    with watched(silence, float("inf")):
        yield from trial.run()


def read_steps(values: Iterable[Mapping[str, Any]], fault: str) -> list[Check]:
    """Return the checks that `check_plugin` yielded; a step that did not end is a line, too.

    Args:
        values: the yielded values.
        fault: the unexpected end of its process; empty if there was none.
    """
    checks: list[Check] = []
    waiting: list[str] = []
    current = "import"
    for value in values:
        waiting += value.get("steps", ())
        if "begin" in value:
            current = value["begin"]
            waiting = [step for step in waiting if step != current]
        if "check" in value:
            found = value["check"]
            checks.append(Check(**{**found, "status": CheckStatus(found["status"])}))
    if fault:
        checks.append(Check(current, CheckStatus.FAILED, fault))
        reason = f"not reached: the process ended at `{current}`"
        checks += [Check(step, CheckStatus.SKIPPED, reason) for step in waiting]
    return checks


def _environment() -> dict[str, str]:
    """Return this process's environment without what might leave the plugin out."""
    return {name: value for name, value in os.environ.items() if name not in {ALLOW_LIST, OFF}}


class _Trial:
    """One plugin, the contract for it, and the results so far."""

    def __init__(
        self,
        point: importlib.metadata.EntryPoint,
        contract: Mapping[str, Any],
        taken: Mapping[str, Sequence[str]],
        *,
        allow_private: bool,
    ) -> None:
        self.allow_private = allow_private
        self.point = point
        self.contract = contract
        self.taken = taken
        self.effects = Effects(point, in_launcher=False)
        self.watch = ImportWatch(self.effects.files)
        self.plugin: Any = None
        self.obstacle = ""
        self.record: PluginRecord | None = None
        self.bench: Bench | None = None
        self.changes: dict[str, list[Effect]] = {}

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield `steps` that will follow, `begin` of each, and its `check`s."""
        yield {"steps": ["import", "source", "hooks"]}
        yield from self.checked("import", self.import_())
        yield from self.checked("source", self.source())
        if self.plugin is None:
            yield from self.checked("hooks", [_skipped("hooks", "it cannot be imported")])
            return
        found = list(check_hooks(self.plugin, self.contract))
        marked = {
            implementation.hook
            for implementation in implementations(self.plugin)
            if implementation.mark is not None
        }
        called = marked | (set(DEFAULT_OFFERS) if "lmcore_create_device" in marked else set())
        hooks = [hook for hook in self.contract["hooks"] if hook in called]
        yield {"steps": [*hooks, EFFECTS]}
        yield from self.checked("hooks", found)
        self.load(clean=all(check.status is not CheckStatus.FAILED for check in found))
        for hook in hooks:
            on_device = hook in DEVICE_CHECKS and not self.obstacle
            yield from self.checked(hook, self.with_effects(hook) if on_device else self.step(hook))
        yield from self.checked(EFFECTS, self.effect_checks())
        yield from self.checked("source", self.imported())

    def checked(self, title: str, checks: Iterable[Check]) -> Iterator[dict[str, Any]]:
        """Yield a step: its beginning, so that a crash has a name, and its checks as JSON values.

        A copy of this process that a plugin has made ends here.
        """
        yield {"begin": title}
        for check in checks:
            self.effects.end_copy()
            yield {"check": dataclasses.asdict(check)}
        self.effects.end_copy()

    def source(self) -> Iterator[Check]:
        """Check the names of lmcore in the plugin's files."""
        return check_source(self.effects.files, self.contract, allow_private=self.allow_private)

    def imported(self) -> Iterator[Check]:
        """Check the names of lmcore that the plugin's code imported and its files do not show."""
        known = {check.detail.partition("` (")[0] for check in self.source()}
        for check in check_imports(
            self.watch.uses, self.contract, allow_private=self.allow_private
        ):
            if check.detail.partition("` (")[0] not in known:
                yield check

    def with_effects(self, hook: str) -> Iterator[Check]:
        """Make the checks of a hook of the device, and keep what the hook changes besides."""
        assert self.bench is not None
        self.effects.in_launcher = hook == _LAUNCH
        had_torch = "torch" in sys.modules
        if not self.bench.why_no_device and hook != _LAUNCH:
            import torch  # noqa: F401  # so that what the hook changes in it is seen
        if hook == _LAUNCH or not self.changes.keys() - {_LAUNCH}:
            self.effects.begin_functions()
        self.effects.begin()
        called = False
        for check in self.step(hook):
            called = called or check.status is not CheckStatus.SKIPPED
            yield check
        if called:
            self.changes[hook] = list(self.effects.found())
        if called and hook == _LAUNCH:
            self.changes[hook] += self.launcher_effects(had_torch=had_torch)

    def launcher_effects(self, *, had_torch: bool) -> Iterator[Effect]:
        """Yield what the hook of the launcher has replaced, or that it loads torch."""
        if had_torch or "torch" not in sys.modules:
            yield from self.effects.replaced()
            return
        place = f": {self.watch.torch_place}" if self.watch.torch_place else ""
        yield Effect(f"it imports torch, in the process that starts the workers{place}")

    def effect_checks(self) -> Iterator[Check]:
        """Yield what the hooks of the device changed."""
        if not self.changes:
            yield _skipped(EFFECTS, "no hook of a device was called")
            return
        found = [
            (f"`{hook}`: {change.text}", change)
            for hook, changes in self.changes.items()
            for change in changes
        ]
        if self.changes.keys() - {_LAUNCH}:
            found += [(change.text, change) for change in self.effects.replaced()]
        for detail, change in found:
            status = CheckStatus.FAILED if change.is_fault else CheckStatus.WARNING
            fix = None
            if detail.startswith(f"`{_LAUNCH}`: it changes the environment variable"):
                fix = "return the variable: each worker gets its own, and a user's value stays"
            yield Check(EFFECTS, status, detail, fix)
        if not found:
            hooks = counted(len(self.changes), "hook")
            detail = f"{hooks} left torch, Python and the process as they were"
            yield Check(EFFECTS, CheckStatus.OK, detail)

    def import_(self) -> Iterator[Check]:
        """Load the object of the entry point."""
        try:
            self.plugin = self.point.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
            detail = f"import of `{self.point.value}` raised {located(error)}"
            yield Check("import", CheckStatus.FAILED, detail)
            return
        if "torch" in sys.modules:
            yield self.torch_check("import", "importing the plugin")
        else:
            yield Check("import", CheckStatus.OK, f"`{self.point.value}`, without torch")

    def torch_check(self, title: str, doing: str) -> Check:
        """Return the failure of something that loads torch."""
        place = f": {self.watch.torch_place}" if self.watch.torch_place else ""
        return Check(
            title,
            CheckStatus.FAILED,
            f"{doing} imports torch{place}",
            "import torch in the hooks that get a device, not at the top of a module",
        )

    def load(self, *, clean: bool) -> None:
        """Load the plugin as a run does, beside the CPU's; keep why its hooks cannot be called."""
        points = [self.point]
        if self.point.name != CPU:
            points += importlib.metadata.entry_points(group=GROUP, name=CPU)
        plugins = discover(env=_environment(), entry_points=points, probe=False)
        (self.record,) = (plugin for plugin in plugins if plugin.entry_point == self.point.name)
        earlier = self.earlier_contracts(self.record.info) if self.record.info else []
        self.bench = Bench(self.record, plugins, {**self.contract, "earlier": earlier})
        if self.record.state is not PluginState.USABLE:
            self.obstacle = self.record.reason if clean else HOOKS_FIRST

    def step(self, hook: str) -> Iterator[Check]:
        """Check a hook."""
        assert self.bench is not None
        if hook == "lmcore_plugin_info":
            yield from self.info()
        elif self.obstacle:
            yield _skipped(hook, f"not called: {self.obstacle}")
        elif hook == "lmcore_probe":
            yield from self.probe(self.bench)
        elif hook in REGISTRATION_CHECKS:
            yield from REGISTRATION_CHECKS[hook](self.bench.record, self.taken)
        elif hook in DEVICE_CHECKS:
            yield from DEVICE_CHECKS[hook](self.bench)
        else:
            yield _skipped(hook, "not called: there is no check of this hook")

    def info(self) -> Iterator[Check]:
        """Check the plugin's `PluginInfo`."""
        assert self.record is not None
        hook, info = "lmcore_plugin_info", self.record.info
        if info is None and self.obstacle != self.record.reason:
            yield _skipped(hook, f"not called: {self.obstacle}")
            return
        problems = [self.record.reason] if info is None else list(self.info_problems(info))
        yield from (Check(hook, CheckStatus.FAILED, problem) for problem in problems)
        if info is not None and not problems:
            detail = f"`{info.name}`, api {info.api}, torch {info.torch}"
            yield Check(hook, CheckStatus.OK, detail)

    def info_problems(self, info: PluginInfo) -> Iterator[str]:
        """Yield faults of the record `PluginInfo`, and the reason why the plugin is not used."""
        yield from field_problems(info, self.contract)
        version, api = self.contract["api"], SpecifierSet(str(info.api))
        included = api.contains(version, prereleases=True)
        if not included:
            yield f"its api `{info.api}` leaves out version {version} of the contract"
        elif api.contains(f"{(later := Version(version).major + 1)}.0", prereleases=True):
            yield (
                f"its api `{info.api}` includes version {later}.0 of the contract, which may "
                f"remove what the plugin uses; add `<{later}`"
            )
        yield from self.earlier_problems(info)
        yield from resource_problems(info)
        assert self.record is not None
        reported = not included and not api.contains(API_VERSION, prereleases=True)
        if self.record.state is not PluginState.USABLE and not reported:
            yield self.record.reason

    def earlier_contracts(self, info: PluginInfo) -> list[dict[str, Any]]:
        """Return the earlier versions of the contract in the plugin's range, oldest first."""
        version, api = Version(self.contract["api"]), SpecifierSet(str(info.api))
        earlier = [one for one in contract_versions() if Version(one) < version]
        return [load_contract(one) for one in earlier if api.contains(one)]

    def earlier_problems(self, info: PluginInfo) -> Iterator[str]:
        """Yield the earlier versions of the contract in the plugin's range that it does not fit."""
        version = self.contract["api"]
        here = {detail for _, detail in self.static_failures(self.contract)}
        for contract in self.earlier_contracts(info):
            earlier = contract["api"]
            for name, detail in self.static_failures(contract):
                if detail.replace(f"version {earlier}", f"version {version}") not in here:
                    yield (
                        f"its api `{info.api}` includes version {earlier} of the contract, and the "
                        f"plugin does not work with that version ({name}: {detail}); say "
                        f"`>={version},<{Version(version).major + 1}`"
                    )
                    break

    def static_failures(self, contract: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return name and detail of the failures that hooks and files show without a call."""
        checks = [*check_hooks(self.plugin, contract), *check_source(self.effects.files, contract)]
        return [
            (check.name, check.detail) for check in checks if check.status is CheckStatus.FAILED
        ]

    def probe(self, bench: Bench) -> Iterator[Check]:
        """Check the plugin's probe."""
        hook = "lmcore_probe"
        had_torch = "torch" in sys.modules
        try:
            bench.record.call(hook, env=_environment())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
            cause = error.why if isinstance(error, LmcoreError) and error.why else located(error)
            yield Check(hook, CheckStatus.FAILED, f"it raised {cause}")
            return
        if not had_torch and "torch" in sys.modules:
            yield self.torch_check(hook, "it")
        self.effects.end_copy()
        probed = discover(env=_environment(), entry_points=[self.point])
        (record,) = probed
        if record.probe is None:
            places = [f" ({place})" for place in self.effects.fork_places[:1]]
            yield Check(hook, CheckStatus.FAILED, "".join([record.reason, *places]))
            return
        bench.record = dataclasses.replace(bench.record, probe=record.probe)
        yield from self.probe_checks(record)

    def probe_checks(self, record: PluginRecord) -> Iterator[Check]:
        """Check a probe that is valid."""
        hook, probe = "lmcore_probe", record.probe
        assert probe is not None
        assert record.info is not None
        assert self.bench is not None
        problems = list(field_problems(probe, self.bench.contract))
        yield from (Check(hook, CheckStatus.FAILED, problem) for problem in problems)
        if not probe.evidence:
            detail = "it gives no evidence, so `lmcore plugins` cannot say why the state is this"
            yield Check(hook, CheckStatus.WARNING, detail)
        if probe.state is ProbeState.BROKEN and not probe.fix:
            yield Check(hook, CheckStatus.WARNING, "it is broken, and no fix is given")
        if probe.device_type not in record.info.provides:
            detail = f"device type `{probe.device_type}` is not among `PluginInfo.provides`"
            yield Check(hook, CheckStatus.WARNING, detail)
        if not problems:
            found = f"`{probe.device_type}` is {probe.state}: {'; '.join(probe.evidence)}"
            yield Check(hook, CheckStatus.OK, found)


def _skipped(title: str, detail: str) -> Check:
    return Check(title, CheckStatus.SKIPPED, detail)
