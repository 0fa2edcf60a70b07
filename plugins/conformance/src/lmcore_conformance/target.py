"""The plugins under test: found, present and of a version that the suite can test; or why not.

`find_target` is for a device, with the plugins without a device that a run on it uses;
`find_plugin_targets` for a plugin without a device, on each device that is present.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from lmcore.base.errors import ConfigError, DeviceError, LmcoreError, suggestion
from lmcore.contract import API_VERSION, ProbeState
from lmcore.plugin import (
    ALLOW_LIST,
    GROUP,
    PluginRecord,
    PluginSet,
    PluginState,
    discover,
    launch_env,
)
from lmcore.plugin.discovery import OFF
from lmcore.plugin.selection import HANDED_DOWN, REQUEST, Selection, chosen_plugin
from lmcore.runtime.launch.rank import RankInfo
from lmcore_conformance import SUITE_VERSION

__all__ = ["OFFERS", "Target", "find_plugin_targets", "find_target", "module_of", "shares_device"]

OFFERS = (
    "lmcore_op_impls",
    "lmcore_comm_backends",
    "lmcore_precision_policies",
    "lmcore_recompute_policies",
    "lmcore_checkpoint_stagers",
)
"""Hooks whose results a run binds."""


@dataclass(frozen=True)
class Target:
    """Plugins under test, on one device, in the launcher.

    Attributes:
        record: Record of the plugin under test, from discovery: the device's, or with `alone` one
            without a device.
        others: Records of the other plugins that take part.
        named: Names of the other plugins that are under test themselves, by `--with`.
        plugins: All of these, and the CPU's.
        selection: The decision for the device; None if only the contract can be tested.
        obstacle: Reason for that.
        alone: True if only the contributions of `record`, which brings no device, are tried.
    """

    record: PluginRecord
    others: tuple[PluginRecord, ...]
    named: tuple[str, ...]
    plugins: PluginSet
    selection: Selection | None
    obstacle: str = ""
    alone: bool = False

    @property
    def name(self) -> str:
        """Name of the plugin."""
        return self.record.name

    @property
    def fault(self) -> str:
        """Reason why nothing of the plugin can be tried; empty if its hooks can be called."""
        return "" if self.record.state is PluginState.USABLE else self.record.reason

    @property
    def module(self) -> str:
        """Module of its hooks."""
        return module_of(self.record)

    @property
    def device_type(self) -> str:
        """Type of the device; empty if there is none."""
        return self.selection.probe.device_type if self.selection else ""

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return self.selection.probe.count if self.selection else 0

    @property
    def under_test(self) -> tuple[PluginRecord, ...]:
        """Records of the plugins that level 0 is about, and the badge."""
        return (self.record, *(one for one in self.others if one.name in self.named))

    def environment(self, rank: RankInfo | None = None) -> dict[str, str]:
        """Return the environment of a process that uses the device, as a run's worker has it.

        Raises:
            LmcoreError: A plugin's launch environment cannot be had.
        """
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHELASTIC_", "PYTEST_")) and name not in {OFF, REQUEST}
        }
        env[ALLOW_LIST] = ",".join(one.entry_point for one in (self.record, *self.others))
        if self.selection is None:
            return env
        place = rank or RankInfo()
        env |= {**place.to_env(), HANDED_DOWN: self.selection.to_json()}
        return env | launch_env(self.plugins, self.selection, place.to_dict(), env)


def shares_device(selection: Selection) -> bool:
    """Return True if several processes can use one device at once, as it computes on the host."""
    return selection.probe.device_type == "cpu" or selection.probe.facts.get("on_host") is True


def module_of(record: PluginRecord) -> str:
    """Return the module of a plugin's hooks."""
    points = metadata.entry_points(group=GROUP, name=record.entry_point)
    return next(iter(points)).value


def find_target(
    named: str, *, companions: Sequence[str] | None = None, contract_only: bool = False
) -> Target:
    """Return the plugin that `--accelerator` names, by its name, entry point or device type.

    Args:
        named: value of `--accelerator`.
        companions: Names of the plugins without a device that take part (`--with`); None: the
            installed ones that offer something that a run binds.
        contract_only: True if an absent device suffices, as for level 0.

    Raises:
        ConfigError: There is no such plugin, it brings no device, or a companion brings one.
        DeviceError: Its device is absent or broken.
        PluginError: It is of another version than lmcore or the suite, or its hooks cannot be used.
    """
    _check_suite()
    installed = _installed()
    first = _record(installed, f"--accelerator {named}", named, by_device=True)
    if companions is None:
        others = [one for one in _installed_companions() if one.entry_point != first.entry_point]
    else:
        others = [_companion(installed, name) for name in dict.fromkeys(companions)]
    record, loaded, plugins = _loaded(first, others)
    names = () if companions is None else tuple(one.name for one in loaded)

    def target(selection: Selection | None, obstacle: str = "") -> Target:
        return Target(record, tuple(loaded), names, plugins, selection, obstacle)

    if record.state is not PluginState.USABLE:
        return target(None, record.reason)  # level 0 reports its fault
    if record.probe is None:
        raise ConfigError(
            f"plugin {record.label} brings no device",
            why="it has no `lmcore_probe`; `--accelerator` tests a device",
            hint=f"`--plugin {record.name}` tests what it offers to devices",
        )
    if record.probe.state is not ProbeState.PRESENT:
        found = "\n".join(record.probe.evidence) or "it gives no evidence"
        if contract_only:
            return target(None, f"{record.probe.state}: {found}")
        raise DeviceError(
            f"device `{record.probe.device_type}` of plugin {record.label} is "
            f"{record.probe.state} here; nothing was tested",
            why=found,
            hint=record.probe.fix or "`--levels L0` tests what needs no device",
        )
    return target(chosen_plugin(plugins, record, "the conformance suite tries it"))


def find_plugin_targets(named: str, *, contract_only: bool = False) -> list[Target]:
    """Return the plugin without a device that `--plugin` names, on each device that is present.

    The CPU is the first.  Devices of the same type are tried once, by the plugin that a run uses;
    `LMCORE_PLUGINS` and `LMCORE_PLUGIN_OFF` restrict them.

    Args:
        named: value of `--plugin`, its name or entry point.
        contract_only: True if no device is needed, as for level 0.

    Raises:
        ConfigError: There is no such plugin, or it brings a device.
    """
    _check_suite()
    installed = _installed()
    first = _record(installed, f"--plugin {named}", named, by_device=False)
    if first.might_bring_device and first.state is PluginState.USABLE:
        raise ConfigError(
            f"`--plugin {named}`: plugin {first.label} brings a device",
            hint=f"`--accelerator {named}` tests it",
        )
    record, _, plugins = _loaded(first, [])
    if contract_only or record.state is not PluginState.USABLE:
        return [Target(record, (), (), plugins, None, record.reason or "not needed", alone=True)]
    targets = []
    for owner in _present_devices(list(discover())):
        record, others, plugins = _loaded(first, [owner])
        selection = chosen_plugin(plugins, others[0], "the conformance suite tries a plugin on it")
        targets.append(Target(record, tuple(others), (), plugins, selection, alone=True))
    return targets


def _present_devices(installed: Sequence[PluginRecord]) -> list[PluginRecord]:
    """Return a plugin for each device type that is present, the CPU's first."""
    best: dict[str, tuple[int, PluginRecord]] = {}
    for record in installed:
        probe = record.probe
        if record.state is not PluginState.USABLE or probe is None:
            continue
        if probe.state is not ProbeState.PRESENT:
            continue
        if probe.device_type not in best or probe.priority > best[probe.device_type][0]:
            best[probe.device_type] = probe.priority, record
    return [best[kind][1] for kind in sorted(best, key=lambda kind: (kind != "cpu", kind))]


def _loaded(
    first: PluginRecord, others: Sequence[PluginRecord]
) -> tuple[PluginRecord, list[PluginRecord], PluginSet]:
    """Return the plugins as a process finds them that loads no others.

    Raises:
        ConfigError: One is for another version of lmcore.
    """
    points = [first.entry_point, *(one.entry_point for one in others)]
    env = {name: value for name, value in os.environ.items() if name != OFF}
    plugins = discover(env=env | {ALLOW_LIST: ",".join(points)})
    records = {one.entry_point: one for one in plugins}
    for point in points:
        if records[point].state is PluginState.REFUSED:
            raise ConfigError(
                f"plugin {records[point].label} is not for this lmcore, and the suite is "
                f"({SUITE_VERSION})",
                why=records[point].reason,
                hint="install versions of lmcore, lmcore-conformance and the plugin that go "
                "together",
            )
    return records[points[0]], [records[point] for point in points[1:]], plugins


def _installed_companions() -> list[PluginRecord]:
    """Return the usable plugins without a device that offer something, as a run finds them."""
    return [
        one
        for one in discover(probe=False).usable
        if not one.might_bring_device and any(map(one.implements, OFFERS))
    ]


def _companion(installed: Sequence[PluginRecord], name: str) -> PluginRecord:
    """Return the plugin that `--with` names.

    Raises:
        ConfigError: There is none, it brings a device, or it cannot be loaded.
    """
    record = _record(installed, f"--with {name}", name, by_device=False)
    if record.state is PluginState.FAILED:
        raise ConfigError(
            f"`--with {name}`: plugin {record.label} failed",
            why=record.reason,
            hint=f"`lmcore plugin check {record.name}` shows its faults",
        )
    if record.might_bring_device:
        raise ConfigError(
            f"`--with {name}`: plugin {record.label} brings a device",
            why="a run uses the device of one plugin, and plugins without a device beside it",
            hint=f"`--accelerator {name}` tests it",
        )
    return record


def _check_suite() -> None:
    """Raise if the suite is for another contract than the installed lmcore's."""
    if API_VERSION.partition(".")[0] != SUITE_VERSION.partition(".")[0]:
        raise ConfigError(
            f"this suite is for version {SUITE_VERSION} of the plugin contract, and lmcore has "
            f"{API_VERSION}",
            hint="install the lmcore-conformance that was released with this lmcore",
        )


def _installed() -> list[PluginRecord]:
    """Return all installed plugins, before one is tested.

    Raises:
        ConfigError: They cannot be listed.
    """
    try:
        return list(discover(env={}))
    except LmcoreError as error:
        raise ConfigError("the installed plugins cannot be listed", why=str(error)) from error


def _record(
    installed: Sequence[PluginRecord], option: str, named: str, *, by_device: bool
) -> PluginRecord:
    """Return the plugin of this name; the first one of several for a device type.

    Raises:
        ConfigError: There is none.
    """
    matching = [plugin for plugin in installed if named in {plugin.name, plugin.entry_point}]
    if by_device and not matching:
        matching = [
            plugin
            for plugin in installed
            if plugin.probe is not None and plugin.probe.device_type == named
        ]
    if matching:
        return matching[0]
    known = {plugin.name for plugin in installed}
    raise ConfigError(
        f"`{option}`: no installed plugin has this name" + (" or this device" * by_device),
        why=f"there are {', '.join(f'`{name}`' for name in sorted(known))}",
        hint=suggestion(named, known),
    )
