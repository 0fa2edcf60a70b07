"""Help texts from options: aligned, wrapped at the terminal's width, bounds and defaults shown."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from lmcore.config.option import Option

__all__ = ["Group", "render_help", "shown_default"]

Group = tuple[str, str, Sequence[Option]]
"""Title, one line about it, options."""

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
        command: As typed: "lmcore train".
        summary: One line.
        groups: Options under their titles.
        usage: What follows the command; default: made from the positionals.
        positionals: Name and meaning of the arguments without a flag.
        epilog: Printed last, as it is.
        width: Columns; default: the terminal's, at most 100.
    """
    columns = width or min(max(shutil.get_terminal_size().columns, 60), 100)
    if usage is None:
        usage = " ".join([*(name for name, _ in positionals), "[--flags]"])
    parts = [summary, f"usage: {command} {usage}".rstrip()]
    if positionals:
        rows = [_row(name, text, columns) for name, text in positionals]
        parts.append("\n".join(["arguments:", *rows]))
    for title, about, options in groups:
        rows = [_row(_left(one), _right(one), columns) for one in options]
        if title == groups[-1][0]:
            rows.append(_row("-h, --help", "Show this help.", columns))
        head = textwrap.fill(f"{title}: {about}".rstrip(), columns)
        parts.append("\n".join([head, *rows]))
    if epilog:
        parts.append(epilog)
    return "\n\n".join(parts)


def shown_default(one: Option) -> str:
    """Return an option's default as a user would type it; empty where there is none to show."""
    if one.required or one.default is None or one.default == ():
        return ""
    if isinstance(one.default, bool):
        return "on" if one.default else "off"
    if isinstance(one.default, tuple):
        return " ".join(str(item) for item in one.default)
    return f"{one.default:g}" if isinstance(one.default, float) else str(one.default)


def _left(one: Option) -> str:
    short = f"-{one.short}, " if one.short else ""
    if one.type is bool:
        return f"{short}--[no-]{one.flag[2:]}" if one.default is True else f"{short}{one.flag}"
    metavar = one.metavar or ("WORD" if one.choices else _METAVARS[one.type])
    return f"{short}{one.flag} {metavar}{' ...' if one.repeated else ''}"


def _right(one: Option) -> str:
    default = shown_default(one)
    facts = [] if one.type is bool and one.default is False else [one.bound]
    if one.required:
        facts.append("required")
    elif default and not (one.type is bool and one.default is False):
        facts.append(f"default {default}")
    told = "; ".join(_unbroken(one, fact) for fact in facts if fact)
    return f"{one.help} [{told}]" if told else one.help


def _unbroken(one: Option, fact: str) -> str:
    """Return a bound or default whose words stay on one line; a list of choices may wrap."""
    return fact if one.choices else fact.replace(" ", _JOINT)


def _row(left: str, right: str, columns: int) -> str:
    wrap = textwrap.TextWrapper(columns - _COLUMN, break_on_hyphens=False, break_long_words=False)
    lines = [line.replace(_JOINT, " ") for line in wrap.wrap(right)] or [""]
    indent = " " * _COLUMN
    head = f"  {left}"
    if len(head) >= _COLUMN:
        return "\n".join([head, *(indent + line for line in lines)])
    first, *rest = lines
    return "\n".join([head.ljust(_COLUMN) + first, *(indent + line for line in rest)])
