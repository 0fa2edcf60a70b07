"""The plugin under test: found, present and of a version that the suite can test; or why not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata

from lmcore.accelerator import API_VERSION, ProbeState
from lmcore.errors import ConfigError, DeviceError, LmcoreError, suggestion
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

__all__ = ["Target", "find_target"]


@dataclass(frozen=True)
class Target:
    """Record of the plugin in the launcher.

    Attributes:
        name: The plugin's.
        module: module of its hooks.
        record: its record from discovery.
        plugins: It and the CPU's plugin.
        selection: The decision for its device; None where only the contract can be tested.
        obstacle: reason for that.
    """

    name: str
    module: str
    record: PluginRecord
    plugins: PluginSet
    selection: Selection | None
    obstacle: str = ""

    @property
    def device_count(self) -> int:
        """The number of devices."""
        return self.selection.probe.count if self.selection else 0

    def environment(self, rank: RankInfo | None = None) -> dict[str, str]:
        """Return the environment of a process that uses the device, as a run's worker has it.

        Raises:
            LmcoreError: The plugin's launch environment cannot be had.
        """
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHELASTIC_", "PYTEST_")) and name not in {OFF, REQUEST}
        }
        env[ALLOW_LIST] = self.record.entry_point
        if self.selection is None:
            return env
        place = rank or RankInfo()
        env |= {**place.to_env(), HANDED_DOWN: self.selection.to_json()}
        return env | launch_env(self.plugins, self.selection, place.to_dict(), env)


def find_target(named: str, *, contract_only: bool = False) -> Target:
    """Return the plugin that `--accelerator` names, by its name, entry point or device type.

    Args:
        named: value of `--accelerator`.
        contract_only: True if an absent device suffices, as for level 0.

    Raises:
        ConfigError: There is no such plugin, or it brings no device.
        DeviceError: Its device is absent or broken.
        PluginError: It is of another version than lmcore or the suite, or its hooks cannot be used.
    """
    _check_suite()
    points = metadata.entry_points(group=GROUP)
    record = _record(named)
    (module,) = {point.value for point in points if point.name == record.entry_point}
    env = {name: value for name, value in os.environ.items() if name != OFF}
    plugins = discover(env=env | {ALLOW_LIST: record.entry_point})
    record = next(plugin for plugin in plugins if plugin.entry_point == record.entry_point)
    if record.state is PluginState.REFUSED:
        raise ConfigError(
            f"plugin {record.label} is not for this lmcore, and the suite is ({SUITE_VERSION})",
            why=record.reason,
            hint="install versions of lmcore, lmcore-conformance and the plugin that go together",
        )
    if record.state is not PluginState.USABLE:
        # Level 0 says what is wrong with it.
        return Target(record.name, module, record, plugins, None, record.reason)
    if record.probe is None:
        raise ConfigError(
            f"plugin {record.label} brings no device",
            why="it has no `lmcore_probe`; the suite tests accelerators",
            hint=f"`lmcore plugin check {record.distribution}` checks any plugin",
        )
    if record.probe.state is not ProbeState.PRESENT:
        found = "\n".join(record.probe.evidence) or "it gives no evidence"
        if contract_only:
            return Target(
                record.name, module, record, plugins, None, f"{record.probe.state}: {found}"
            )
        raise DeviceError(
            f"device `{record.probe.device_type}` of plugin {record.label} is "
            f"{record.probe.state} here; nothing was tested",
            why=found,
            hint=record.probe.fix or "`--levels L0` tests what needs no device",
        )
    selection = chosen_plugin(plugins, record, "the conformance suite tries it")
    return Target(record.name, module, record, plugins, selection)


def _check_suite() -> None:
    """Raise where the suite is for another contract than the installed lmcore's."""
    if API_VERSION.partition(".")[0] != SUITE_VERSION.partition(".")[0]:
        raise ConfigError(
            f"this suite is for version {SUITE_VERSION} of the plugin contract, and lmcore has "
            f"{API_VERSION}",
            hint="install the lmcore-conformance that was released with this lmcore",
        )


def _record(named: str) -> PluginRecord:
    """Return the plugin of this name, before it is tested; several for a device type: the first.

    Raises:
        ConfigError: There is none.
    """
    try:
        found = list(discover(env={}))
    except LmcoreError as error:
        raise ConfigError("the installed plugins cannot be listed", why=str(error)) from error
    matching = [plugin for plugin in found if named in {plugin.name, plugin.entry_point}]
    matching = matching or [
        plugin for plugin in found if plugin.probe is not None and plugin.probe.device_type == named
    ]
    if matching:
        return matching[0]
    known = {plugin.name for plugin in found}
    raise ConfigError(
        f"`--accelerator {named}`: no installed plugin has this name or this device",
        why=f"there are {', '.join(f'`{name}`' for name in sorted(known))}",
        hint=suggestion(named, known),
    )
