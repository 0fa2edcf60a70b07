"""Settings that plugins add to a run's: one section for each plugin, its flags named after it.

A field `depth` of the plugin `mine` is the flag `--mine-depth`, the key `depth` below `mine:` in a
file, and `config.plugins["mine"].depth`.  The prefix keeps the options of plugins apart from each
other and from later options of the core.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from lmcore.base.errors import ConfigError
from lmcore.config.option import Option, options_of

__all__ = [
    "NO_PLUGINS",
    "LeftOut",
    "PluginSections",
    "PluginSettings",
    "plugin_options",
    "section_name",
    "summary_of",
]


class PluginSettings(dict[str, Any]):
    """The plugins' sections by plugin name: a mapping that cannot be changed.

    A `dict`, so that `dataclasses.asdict` and JSON handle it like the other sections.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a run's settings cannot be changed")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Return the hash of the settings; equal settings have equal hashes."""
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through the constructor, as items cannot be set."""
        return type(self), (dict(self),)


@dataclass(frozen=True)
class LeftOut:
    """An installed plugin whose settings are unknown.

    Attributes:
        reason: Why they are unknown, to follow the plugin's name: "is turned off".
        wanted: True if the user turned the plugin off; its section in a file is then ignored.
    """

    reason: str
    wanted: bool = False


@dataclass(frozen=True)
class PluginSections:
    """Sections that plugins add to the settings of a run.

    Attributes:
        sections: Dataclass of each plugin that has a section, by plugin name.
        left_out: Plugins whose settings are unknown, by plugin name.
    """

    sections: Mapping[str, type] = field(default_factory=dict)
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)

    @functools.cached_property
    def options(self) -> Mapping[str, Option]:
        """Every option of the plugins by its name, `mine_depth`."""
        return {
            option.name: option
            for plugin, section in self.sections.items()
            for option in plugin_options(plugin, section)
        }

    def reasons(self) -> dict[str, str]:
        """Return why the flags of a plugin that is left out are unknown, by prefix of the flag."""
        return {
            f"--{section_name(name).replace('_', '-')}-": f"plugin `{name}` {out.reason}"
            for name, out in self.left_out.items()
        }

    def groups(self) -> list[tuple[str, str, tuple[Option, ...]]]:
        """Return title, summary and options of each plugin's group in a help."""
        return [
            (f"plugin {name}", summary_of(section), plugin_options(name, section))
            for name, section in self.sections.items()
        ]

    def settings(self, values: Mapping[str, Any] = MappingProxyType({})) -> PluginSettings:
        """Return the sections, filled from *values* by option name, else with their defaults.

        Raises:
            ConfigError: A section refuses its values.
        """
        return PluginSettings({plugin: self._filled(plugin, values) for plugin in self.sections})

    def _filled(self, plugin: str, values: Mapping[str, Any]) -> Any:
        section = self.sections[plugin]
        given = {
            option.key: values[option.name]
            for option in plugin_options(plugin, section)
            if option.name in values
        }
        try:
            return section(**given)
        except ConfigError:
            raise
        except Exception as cause:
            raise ConfigError(
                f"plugin `{plugin}` does not accept its settings",
                why=f"{type(cause).__name__}: {cause}",
            ) from cause


NO_PLUGINS = PluginSections()
"""The sections of a command that reads no plugins' settings."""


def summary_of(section: type) -> str:
    """Return the first line of a section's docstring."""
    return (section.__doc__ or "").strip().partition("\n")[0]


def section_name(plugin: str) -> str:
    """Return the name of a plugin's section in files and options."""
    return plugin.replace("-", "_")


def plugin_options(plugin: str, section: type) -> tuple[Option, ...]:
    """Return the options of a plugin's section, in order."""
    return options_of(section, name=section_name(plugin), plugin=plugin)
