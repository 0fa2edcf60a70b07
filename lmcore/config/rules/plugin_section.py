"""Requirements on the section that holds a plugin's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lmcore.base.errors import ConfigError
from lmcore.config.option import Option, is_option
from lmcore.config.plugin_section import plugin_options, section_name
from lmcore.config.section import SECTION_NAMES

__all__ = ["section_problem"]


def section_problem(plugin: str, section: object) -> str | None:
    """Return why *section* cannot hold the settings of *plugin*; None if it can."""
    name = section_name(plugin)
    if not name.isascii() or not name.isidentifier() or name != name.lower():
        return "the name of a plugin with settings consists of small letters, digits and dashes"
    if name in {*SECTION_NAMES, "plugins", "preset"}:
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
    return next((problem for option in options for problem in _option_problems(option)), None)


def _option_problems(option: Option) -> Iterator[str]:
    key = option.key
    if key != key.lower() or not key.isascii():
        yield f"`{key}` is not in small letters"
    if not option.help.strip():
        yield f"`{key}` has no help"
    if option.required:
        yield f"`{key}` has no default"
        return
    try:
        fits = option.convert(option.default, where=f"the default of `{key}`") == option.default
    except ConfigError as problem:
        yield f"{problem.what}; {problem.why or problem.hint}"
    else:
        if not fits:
            yield f"the default of `{key}` is not of its type"
