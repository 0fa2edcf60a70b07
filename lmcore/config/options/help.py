"""Help texts from options: aligned, wrapped at the terminal's width, bounds and defaults shown."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from collections.abc import Sequence

from lmcore.config.option import Option, options_of
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections, summary_of

__all__ = ["Group", "fitted", "flag_form", "render_help", "render_run_help", "shown_default"]

Group = tuple[str, str, Sequence[Option]]
"""Title, summary in one line, options."""

_JOINT = "\N{NO-BREAK SPACE}"
_COLUMN = 32  # where the descriptions start
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def render_help(
    command: str,
    summary: str,
    groups: Sequence[Group],
    *,
    usage: str | None = None,
    positionals: Sequence[tuple[str, str]] = (),
    epilog: str = "",
    width: int | None = None,
) -> str:
    """Return a command's help, without a trailing newline.

    Args:
        command: The command as typed: "lmcore train".
        summary: Summary of the command, one line.
        groups: Options under their titles.
        usage: Arguments in the usage line; default: the positionals and `[--flags]`.
        positionals: Name and meaning of each argument without a flag.
        epilog: Text printed last.
        width: Number of columns; default: the terminal's, at most 100.
    """
    columns = width or _columns()
    if usage is None:
        usage = " ".join([*(name for name, _ in positionals), "[--flags]"])
    parts = [summary, f"usage: {command} {usage}".rstrip()]
    if positionals:
        rows = [_row(name, text, columns) for name, text in positionals]
        parts.append("\n".join(["arguments:", *rows]))
    for title, about, options in groups:
        rows = [_row(flag_form(option), _right(option), columns) for option in options]
        if title == groups[-1][0]:
            rows.append(_row("-h, --help", "Show this help.", columns))
        head = textwrap.fill(f"{title}: {about}".rstrip(), columns)
        parts.append("\n".join([head, *rows]))
    if epilog:
        parts.append(epilog)
    return fitted("\n\n".join(parts), columns)


def render_run_help(
    command: str, summary: str, *, plugins: PluginSections = NO_PLUGINS, epilog: str = ""
) -> str:
    """Return the help of *command*, which takes YAML files and the flags of every section.

    Args:
        command: The command as typed: "lmcore train".
        summary: Summary of the command, one line.
        plugins: Sections that plugins add, each a separate group.
        epilog: Text printed below the options, before the presets.
    """
    # Here: other helps need none of the sections, which take a while to import.
    from lmcore.config.continued import CONTINUE_OPTION
    from lmcore.config.megatron_defaults import DEFAULTS_OPTION
    from lmcore.config.preset import PRESET_OPTION, PRESETS
    from lmcore.config.section import SECTIONS
    from lmcore.config.token_lengths import TOKEN_OPTIONS

    sources = (PRESET_OPTION, DEFAULTS_OPTION, CONTINUE_OPTION)
    groups: list[Group] = [("start from", "", sources)]
    for name, section in SECTIONS.items():
        groups.append((name, summary_of(section), options_of(section, name=name)))
    groups.append(("lengths in tokens", "Numbers of samples, by their tokens.", TOKEN_OPTIONS))
    groups += plugins.groups()
    names = [f"  {preset.name:<16}{preset.summary}" for preset in PRESETS.values()]
    presets = "\n".join(["presets:", *names])
    return render_help(
        command,
        summary,
        groups,
        usage="[config.yaml ...] [--flags]",
        positionals=[
            ("config.yaml", "Settings by section; flags override them, later files earlier ones.")
        ],
        epilog="\n\n".join(part for part in (epilog, presets) if part),
    )


def fitted(text: str, columns: int | None = None) -> str:
    """Return a help text with each line that is too long wrapped.

    Lines of prose that follow each other are wrapped together; the second column of a table keeps
    its indent.  Examples of commands are not broken.

    Args:
        text: The text; lines that begin with a space are rows of a table or commands.
        columns: Number of columns; default: the terminal's, at least 60 and at most 100.
    """
    columns = columns or _columns()
    if all(len(line) <= columns for line in text.splitlines()):
        return text
    found: list[str] = []
    for is_prose, group in itertools.groupby(
        text.splitlines(), lambda line: line[:1] not in {"", " "}
    ):
        lines = list(group)
        if is_prose and max(map(len, lines)) > columns and not lines[0].startswith("usage:"):
            found += _wrapped(" ".join(lines), columns)
            continue
        for line in lines:
            row = re.match(r"(usage: lmcore |  (?!lmcore )\S+ +(?=\S))(.*)", line)
            if len(line) <= columns or row is None:
                found.append(line)
            else:
                found += _wrapped(row[2], columns, row[1])
    return "\n".join(found)


def _wrapped(text: str, columns: int, head: str = "") -> list[str]:
    """Return *text* in lines; *head* begins the first, the others are indented by its length."""
    glued = re.sub(r"`[^`]*`", lambda quoted: quoted[0].replace(" ", _JOINT), text)
    wrap = textwrap.TextWrapper(
        columns,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(_JOINT, " ") for line in wrap.wrap(glued)]


def _columns() -> int:
    return min(max(shutil.get_terminal_size().columns, 60), 100)


def shown_default(option: Option) -> str:
    """Return an option's default as a user would type it; empty if there is none to show."""
    if option.required or option.default is None or option.default == ():
        return ""
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if isinstance(option.default, tuple):
        return " ".join(str(item) for item in option.default)
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def flag_form(option: Option) -> str:
    """Return an option's flag with a placeholder of its value: `--load DIR`."""
    if option.type is bool:
        negatable = "[no-]" if option.default is True else ""
        return f"--{negatable}{option.flag[2:]}"
    metavar = option.metavar or ("WORD" if option.choices else _METAVARS[option.type])
    return f"{option.flag} {metavar}{' ...' if option.repeated else ''}"


def _right(option: Option) -> str:
    default = shown_default(option)
    facts = [] if option.type is bool and option.default is False else [option.bound]
    if option.required:
        facts.append("required")
    elif default and not (option.type is bool and option.default is False):
        facts.append(f"default {default}")
    notes = "; ".join(_unbroken(option, fact) for fact in facts if fact)
    return f"{option.help} [{notes}]" if notes else option.help


def _unbroken(option: Option, fact: str) -> str:
    """Return a bound or default joined so that it does not wrap; a list of choices may wrap."""
    return fact if option.choices else fact.replace(" ", _JOINT)


def _row(left: str, right: str, columns: int) -> str:
    wrap = textwrap.TextWrapper(columns - _COLUMN, break_on_hyphens=False, break_long_words=False)
    lines = [line.replace(_JOINT, " ") for line in wrap.wrap(right)] or [""]
    indent = " " * _COLUMN
    head = f"  {left}"
    if len(head) >= _COLUMN:
        return "\n".join([head, *(indent + line for line in lines)])
    first, *rest = lines
    return "\n".join([head.ljust(_COLUMN) + first, *(indent + line for line in rest)])
