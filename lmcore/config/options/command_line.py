"""What a command takes: the flags of a section, positional arguments, the help.

`lmcore.config.options.flags` reads the words; here they become a filled section, or a help that is
printed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lmcore.config.option import Option, options_of
from lmcore.config.options.flags import (
    ForeignFlag,
    ParsedFlags,
    Positional,
    Translation,
    UnsupportedFlagError,
    parse_flags,
)
from lmcore.config.options.help import Group, render_help
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections, PluginSettings, summary_of
from lmcore.errors import ConfigError, LmcoreError

__all__ = [
    "ForeignFlag",
    "ParsedFlags",
    "Positional",
    "Translation",
    "UnsupportedFlagError",
    "parse_flags",
    "parse_section",
    "parse_with_plugins",
    "render_help",
    "wants_help",
]

logger = logging.getLogger(__name__)

Section = TypeVar("Section")


def wants_help(argv: Sequence[str]) -> bool:
    """Return whether `-h` or `--help` stands before any `--`."""
    before = argv[: argv.index("--")] if "--" in argv else argv
    return "-h" in before or "--help" in before


def parse_section(
    section: type[Section],
    argv: Sequence[str],
    *,
    command: str,
    positionals: Sequence[str] = (),
    foreign: Mapping[str, ForeignFlag] | None = None,
    epilog: str = "",
) -> Section:
    """Return *section* filled from *argv*: all that a small command needs.

    The arguments are those of `parse_with_plugins`, and what it raises is raised.
    """
    filled, _ = parse_with_plugins(
        section,
        argv,
        command=command,
        positionals=positionals,
        foreign=foreign,
        epilog=epilog,
    )
    return filled


def parse_with_plugins(
    section: type[Section],
    argv: Sequence[str],
    *,
    command: str,
    plugins: PluginSections = NO_PLUGINS,
    positionals: Sequence[str] = (),
    foreign: Mapping[str, ForeignFlag] | None = None,
    epilog: str = "",
) -> tuple[Section, PluginSettings]:
    """Return *section* filled from *argv*, and the plugins' settings.

    Foreign flags that were understood are logged, one warning each.

    Args:
        section: A frozen dataclass whose fields are made with `option`; its docstring's first
            line is the command's summary.
        argv: The arguments after the command's name.
        command: As typed, for the help: "lmcore data inspect".
        plugins: The settings that plugins add.
        positionals: Names of the fields that are given without a flag, in order; one whose
            default is `REQUIRED` must be given, a list takes all words left.
        foreign: Flags of other programs that are accepted.
        epilog: Printed below the help.

    Raises:
        ConfigError: All problems of the command line.
        SystemExit: With status 0, after the help was asked for and printed.
    """
    options = {one.name: one for one in options_of(section)}
    named = {name: one for name, one in options.items() if name not in positionals}
    places = [_positional(options[name]) for name in positionals]
    if wants_help(argv):
        groups: list[Group] = [("options", "", tuple(named.values())), *plugins.groups()]
        described = [(one.name.upper(), one.help) for one in places]
        about = summary_of(section)
        text = render_help(command, about, groups, positionals=described, epilog=epilog)
        print(text)  # noqa: T201 - help is what was asked for on standard output
        raise SystemExit(0)
    _require_apart(named, plugins, command)
    everything = {**named, **plugins.options}
    parsed = parse_flags(
        argv,
        everything,
        positionals=places,
        foreign=foreign,
        reasons=plugins.reasons(),
    )
    problems = list(parsed.problems)
    values = {name: value for name, value in parsed.values.items() if name in named}
    for name in positionals:
        _convert_positional(options[name], parsed.positionals[name], values, problems)
    for one in named.values():
        wrong = any(one.flag in problem.what for problem in problems)
        if one.required and one.name not in values and not wrong:
            problems.append(ConfigError(f"`{one.flag}` is required", why=one.help))
    if problems:
        raise ConfigError.collect(problems)
    for notice in parsed.notices:
        logger.warning("%s", notice)
    return section(**values), plugins.settings(parsed.values)


def _require_apart(own: Mapping[str, Option], plugins: PluginSections, command: str) -> None:
    """Raise where a plugin's flag is one of the command's."""
    flags = {flag for one in own.values() for flag in one.flags}
    for one in plugins.options.values():
        for flag in one.flags:
            if flag in flags:
                raise ConfigError(
                    f"plugin `{one.plugin}` adds the flag `{flag}`, which `{command}` has itself",
                    hint=f"leave the plugin out by `--plugin-off {one.plugin}`",
                )


def _positional(one: Option) -> Positional:
    return Positional(one.name, one.help, int(one.required), None if one.repeated else 1)


def _convert_positional(
    one: Option, words: tuple[str, ...], values: dict[str, Any], problems: list[LmcoreError]
) -> None:
    if not words:
        return
    try:
        given = list(words) if one.repeated else words[0]
        values[one.name] = one.convert(given, where=f"`{' '.join(words)}`")
    except ConfigError as problem:
        problems.append(problem)
