"""Command line of a command: its arguments parsed into a section, or its help printed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.config.option import Option, options_of
from lmcore.config.options.flags import (
    ForeignFlag,
    ParsedFlags,
    Positional,
    Translation,
    UnsupportedFlagError,
    parse_flags,
)
from lmcore.config.options.help import Group, flag_form, render_help
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections, PluginSettings, summary_of

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
    """Return True if `-h` or `--help` precedes any `--`."""
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
    """Return *section* filled from *argv*, for a command without plugins' settings.

    See `parse_with_plugins` for the arguments and errors.
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

    Accepted flags of other programs are logged, all in one message.

    Args:
        section: A frozen dataclass whose fields are made with `option`; the first line of its
            docstring is the summary of the command.
        argv: Arguments after the name of the command.
        command: The command as typed, for the help: "lmcore data inspect".
        plugins: Sections that plugins add.
        positionals: Names of the fields that are given without a flag, in order; a field whose
            default is `REQUIRED` must be given, a list takes all remaining words.
        foreign: Known flags of other programs, by flag.
        epilog: Text printed below the help.

    Raises:
        ConfigError: Every problem of the command line.
        SystemExit: With status 0, after the help was printed.
    """
    options = {option.name: option for option in options_of(section)}
    named = {name: option for name, option in options.items() if name not in positionals}
    arguments = [_positional(options[name]) for name in positionals]
    if wants_help(argv):
        groups: list[Group] = [("options", "", tuple(named.values())), *plugins.groups()]
        described = [(option.name.upper(), option.help) for option in arguments]
        about = summary_of(section)
        usage = " ".join([*map(_usage, arguments), "[--flags]"])
        text = render_help(
            command, about, groups, usage=usage, positionals=described, epilog=epilog
        )
        print(text)  # noqa: T201 - the output of `--help`
        raise SystemExit(0)
    _check_flags(named, plugins, command)
    everything = {**named, **plugins.options}
    parsed = parse_flags(
        argv,
        everything,
        positionals=arguments,
        foreign=foreign,
        reasons=plugins.reasons(),
    )
    problems = list(parsed.problems)
    values = {name: value for name, value in parsed.values.items() if name in named}
    for name in positionals:
        _convert_positional(options[name], parsed.positionals[name], values, problems)
    for option in named.values():
        wrong = any(option.flag in problem.what for problem in problems)
        if option.required and option.name not in values and not wrong:
            hint = f"`{flag_form(option)}`: {option.help}"
            problems.append(ConfigError(f"`{option.flag}` is required", hint=hint))
    if problems:
        raise ConfigError.collect(problems)
    for notice in parsed.notices:
        logger.info("%s", notice)
    return section(**values), plugins.settings(parsed.values)


def _check_flags(own: Mapping[str, Option], plugins: PluginSections, command: str) -> None:
    """Refuse a plugin's flag that the command has itself."""
    flags = {flag for option in own.values() for flag in option.flags}
    for option in plugins.options.values():
        for flag in option.flags:
            if flag in flags:
                raise ConfigError(
                    f"plugin `{option.plugin}` adds the flag `{flag}`, which `{command}` has",
                    hint=f"turn the plugin off: `--plugin-off {option.plugin}`",
                )


def _usage(argument: Positional) -> str:
    name = argument.name.upper() + (" ..." if argument.maximum is None else "")
    return name if argument.minimum else f"[{name}]"


def _positional(option: Option) -> Positional:
    return Positional(
        option.name, option.help, int(option.required), None if option.repeated else 1
    )


def _convert_positional(
    option: Option, words: tuple[str, ...], values: dict[str, Any], problems: list[LmcoreError]
) -> None:
    if not words:
        return
    try:
        given = list(words) if option.repeated else words[0]
        values[option.name] = option.convert(given, where=f"`{' '.join(words)}`")
    except ConfigError as problem:
        problems.append(problem)
