"""Settings that plugins add to a run's: one section a plugin, its flags named after the plugin.

A field `depth` of the plugin `mine` is the flag `--mine-depth`, the key `depth` below `mine:` in a
file, and `config.plugins["mine"].depth`.  The name in front keeps plugins out of each other's way,
and out of the way of options that the core gets later.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from lmcore.config.option import Option, is_option, options_of
from lmcore.errors import ConfigError

__all__ = [
    "NO_PLUGINS",
    "LeftOut",
    "PluginSections",
    "PluginSettings",
    "plugin_options",
    "section_name",
    "section_problem",
    "summary_of",
]


class PluginSettings(dict[str, Any]):
    """The plugins' sections by plugin name: a mapping that nobody can change.

    A `dict`, so that `dataclasses.asdict` and JSON take it as they take the other sections.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a run's settings cannot be changed")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Equal settings have equal hashes."""
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through the constructor, the one way in."""
        return type(self), (dict(self),)


@dataclass(frozen=True)
class LeftOut:
    """A plugin that is installed and whose settings are unknown.

    Attributes:
        reason: Why, in words.
        wanted: Whether its user wants it so: then its section in a file is passed over.
    """

    reason: str
    wanted: bool = False


@dataclass(frozen=True)
class PluginSections:
    """What plugins add to the settings of a run.

    Attributes:
        sections: Dataclass of each plugin that has one, by plugin name.
        left_out: Plugins whose settings are unknown, by plugin name.
    """

    sections: Mapping[str, type] = field(default_factory=dict)
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)

    @functools.cached_property
    def options(self) -> Mapping[str, Option]:
        """Every option of the plugins by its name, `mine_depth`."""
        return {
            one.name: one
            for plugin, section in self.sections.items()
            for one in plugin_options(plugin, section)
        }

    def reasons(self) -> dict[str, str]:
        """Return why flags that begin so are unknown, for the plugins that are left out."""
        return {
            f"--{section_name(name).replace('_', '-')}-": f"plugin `{name}` {one.reason}"
            for name, one in self.left_out.items()
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
            one.key: values[one.name]
            for one in plugin_options(plugin, section)
            if one.name in values
        }
        try:
            return section(**given)
        except ConfigError:
            raise
        except Exception as cause:
            raise ConfigError(
                f"plugin `{plugin}` does not take its settings",
                why=f"{type(cause).__name__}: {cause}",
            ) from cause


NO_PLUGINS = PluginSections()
"""Of commands that know no plugins."""


def summary_of(section: type) -> str:
    """Return the first line of a section's docstring."""
    return (section.__doc__ or "").strip().partition("\n")[0]


def section_name(plugin: str) -> str:
    """Return what a plugin's section is called in files and options."""
    return plugin.replace("-", "_")


def plugin_options(plugin: str, section: type) -> tuple[Option, ...]:
    """Return the options of a plugin's section, in order."""
    return options_of(section, name=section_name(plugin), plugin=plugin)


def section_problem(plugin: str, section: object) -> str | None:
    """Return why *section* cannot hold the settings of *plugin*; None when it can."""
    from lmcore.config.section import SECTIONS

    name = section_name(plugin)
    if not name.isascii() or not name.isidentifier() or name != name.lower():
        return "a plugin with settings has a name of small letters, digits and dashes"
    if name in {*SECTIONS, "plugins", "preset"}:
        return f"the section `{name}` is lmcore's own"
    if not isinstance(section, type) or not dataclasses.is_dataclass(section):
        return "a section is a dataclass"
    if not section.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "a section is frozen: `@dataclass(frozen=True)`"
    fields = dataclasses.fields(section)
    foreign = [field.name for field in fields if not is_option(field)]
    if foreign or not fields:
        named = f"`{foreign[0]}` is not" if foreign else "it has none"
        return f"every field is made with `lmcore.config.option.option`: {named}"
    return _options_problem(plugin, section)


def _options_problem(plugin: str, section: type) -> str | None:
    try:
        options = plugin_options(plugin, section)
    except (NameError, TypeError, ValueError) as cause:
        return f"its types cannot be read: {cause}"
    problems = (problem for one in options for problem in _option_problems(one))
    return next(problems, None)


def _option_problems(one: Option) -> Iterator[str]:
    if one.key != one.key.lower() or not one.key.isascii():
        yield f"`{one.key}` is not written in small letters"
    if one.short:
        yield f"`{one.key}` asks for the flag `-{one.short}`; those are lmcore's own"
    if not one.help.strip():
        yield f"`{one.key}` has no help"
    if one.required:
        yield f"`{one.key}` has no default"
        return
    try:
        fits = one.convert(one.default, where=f"the default of `{one.key}`") == one.default
    except ConfigError as problem:
        yield f"{problem.what}; {problem.why or problem.hint}"
    else:
        if not fits:
            yield f"the default of `{one.key}` is not of its type"
