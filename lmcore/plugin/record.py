"""Records of the installed plugins, and the one way to call their hooks.

`lmcore.plugin.discovery` makes the records; a plugin that could not be used keeps its record,
with the reason and the traceback, so that `lmcore plugins` can show it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import pluggy

from lmcore.base.errors import ConfigError, LmcoreError, PluginError, suggestion
from lmcore.contract.probe import PluginInfo, Probe
from lmcore.plugin.output import stdout_to_stderr
from lmcore.plugin.torch_backends import backend_error

__all__ = ["HookError", "PluginRecord", "PluginSet", "PluginState", "describe", "located"]

CPU = "cpu"
"""torch's name of the host: the only device type that the core names, as the last resort."""


class PluginState(StrEnum):
    """State of a plugin: only a usable one takes part."""

    USABLE = "usable"
    REFUSED = "refused"
    FAILED = "failed"
    OFF = "off"


class HookError(PluginError):
    """An exception in a plugin's hook that is no `LmcoreError`, so that it has no hint."""


def describe(error: BaseException) -> str:
    """Return an exception in one line, with the first cause of its chain where that is another."""
    shown = _one_line(error)
    root = error
    while (
        cause := root.__cause__ or (None if root.__suppress_context__ else root.__context__)
    ) and (cause is not error):
        root = cause
    first = _one_line(root)
    return shown if first in shown else f"{shown} (caused by {first})"


def located(error: BaseException) -> str:
    """Return an exception in one line, with the plugin's line at which it was raised."""
    from lmcore.plugin.isolation.location import exception_location

    place = exception_location(error)
    return describe(error) + (f" ({place})" if place else "")


def _one_line(error: BaseException) -> str:
    text = error.what if isinstance(error, LmcoreError) else str(error)
    lines = " ".join(text.split())
    return f"{type(error).__name__}: {lines}" if lines else type(error).__name__


@dataclass(frozen=True)
class PluginRecord:
    """One entry point of the group `lmcore.plugins`, after it was looked at.

    Attributes:
        name: The plugin's name; the entry point's if the plugin could not be loaded.
        entry_point: Name of the entry point, as `LMCORE_PLUGINS` lists it.
        distribution: The package that brings it, by pip's name.
        version: Version of that package.
        state: Usable, or the kind of reason why it is not.
        reason: Reason why it is not usable; empty for a usable one.
        traceback: Python's traceback if it failed.
        info, probe: Results of these hooks; None if it did not get so far, and `probe` None for a
            plugin that brings no device.
        hooks: Pluggy's manager of this plugin alone, so that one call reaches one plugin.
        slow: Parts of its discovery that took seconds, with their times; empty if none did.
    """

    name: str
    entry_point: str
    distribution: str
    version: str
    state: PluginState
    reason: str = ""
    traceback: str = ""
    info: PluginInfo | None = None
    probe: Probe | None = None
    hooks: pluggy.PluginManager | None = field(default=None, repr=False, compare=False)
    slow: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """The plugin with its distribution and version, for messages."""
        return f"`{self.name}` ({self.distribution} {self.version})"

    @property
    def trouble(self) -> str:
        """The state and its reason, as a predicate for messages: "failed: no libx.so"."""
        verb = "" if self.state is PluginState.FAILED else "is "
        return f"{verb}{self.state}: {self.reason}"

    @property
    def troubled(self) -> bool:
        """True if the plugin is installed and wanted, and cannot be used."""
        return self.state in (PluginState.FAILED, PluginState.REFUSED)

    @property
    def might_bring_device(self) -> bool:
        """True if the plugin may bring a device, also if that is not known."""
        return self.hooks is None or self.implements("lmcore_probe")

    def implements(self, hook: str) -> bool:
        """Return True if the plugin has this hook."""
        return self.hooks is not None and bool(getattr(self.hooks.hook, hook).get_hookimpls())

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call one hook of this plugin alone and return what it returned.

        What it prints goes to standard error: standard output is the command's.

        Raises:
            HookError: It raised something that is no `LmcoreError`, which passes through.
        """
        assert self.hooks is not None
        assert self.implements(hook)
        try:
            with stdout_to_stderr():
                results = getattr(self.hooks.hook, hook)(**arguments)
        except LmcoreError:
            raise
        except Exception as cause:
            if (of_torch := backend_error(cause)) is not None:
                raise of_torch from cause
            raise HookError(
                f"plugin {self.label} raised in `{hook}`",
                why=located(cause),
                hint=f"update or remove `{self.distribution}`, or report this to its authors",
            ) from cause
        return results[0] if results else None


@dataclass(frozen=True)
class PluginSet:
    """All installed plugins, in the order of their names."""

    records: tuple[PluginRecord, ...]

    def __iter__(self) -> Iterator[PluginRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def usable(self) -> tuple[PluginRecord, ...]:
        """The plugins that take part."""
        return tuple(record for record in self.records if record.state is PluginState.USABLE)

    @property
    def troubled(self) -> tuple[PluginRecord, ...]:
        """The plugins that should take part and cannot."""
        return tuple(record for record in self.records if record.troubled)

    def without(self, names: Collection[str], source: str = "--plugin-off") -> PluginSet:
        """Return the set with some plugins switched off.

        Args:
            names: Names of plugins, or of their entry points.
            source: The flag or variable that gave the names, for messages.

        Raises:
            ConfigError: A plugin is not installed, or is the CPU's.
        """
        known = {record.entry_point for record in self.records} | {
            record.name for record in self.records
        }
        for name in names:
            if name == CPU:
                raise ConfigError(
                    f"`{source}` cannot leave out the plugin `{CPU}`",
                    why="it is the one that every installation has, and the last resort",
                )
            if name not in known:
                raise ConfigError(
                    f"`{source}` names the plugin `{name}`, which is not installed",
                    hint=suggestion(name, known - {CPU})
                    if known - {CPU}
                    else f"the only plugin here is `{CPU}`, which always takes part",
                )
        return PluginSet(
            tuple(
                replace(record, state=PluginState.OFF, reason=f"`{source}` leaves it out")
                if record.state is not PluginState.OFF
                and {record.name, record.entry_point} & set(names)
                else record
                for record in self.records
            )
        )

    def participants(self, plugin: str) -> Sequence[PluginRecord]:
        """Return the chosen plugin, then the plugins that bring no device and serve every one."""
        chosen = self.usable_record(plugin)
        extensions = [one for one in self.usable if one.probe is None and one is not chosen]
        return [chosen, *extensions]

    def usable_record(self, plugin: str) -> PluginRecord:
        """Return the usable plugin of this name.

        Raises:
            PluginError: The plugin has none; the message has the reason.
        """
        for one in self.usable:
            if one.name == plugin:
                return one
        found = [one for one in self.records if one.name == plugin]
        why = "; ".join(f"{one.label} {one.trouble}" for one in found)
        raise PluginError(
            f"plugin `{plugin}` cannot be used in this process",
            why=why or "it is not installed here",
            hint="compare `lmcore plugins` here with the machine that launched the run",
        )
