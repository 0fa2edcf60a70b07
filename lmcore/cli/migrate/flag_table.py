"""Table of a command's flags for `lmcore migrate`: what becomes of each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import LmcoreError, counted, printable
from lmcore.config.foreign.megatron import ENGINE_FLAG
from lmcore.config.option import Option
from lmcore.config.options.flags import (
    ForeignFlag,
    Positional,
    UnsupportedFlagError,
    parse_flags,
)

__all__ = ["LEFT", "FlagRow", "flag_groups", "flag_rows", "print_table"]

_FLAG = re.compile(r"--?[A-Za-z]")
_WIDEST = 44
_OF_DEVICE = {
    "--distributed-backend": "the device's own backend is the default; `lmcore train` with the "
    "flag asks for another"
}
"""Flags whose values belong to the script's device, with the reason to leave them out."""

SAME, RENAMED, ALREADY = "same", "renamed", "already so"
REPLACED, NOT, UNKNOWN, WRONG = "replaced by", "not supported", "unknown", "wrong value"
OPEN, AGAIN, OF_DEVICE = "has no value", "given again", "left out"
LEFT = (REPLACED, NOT, UNKNOWN, WRONG, OPEN, AGAIN, OF_DEVICE)
"""Kinds of flags that the result does not have."""


@dataclass(frozen=True)
class FlagRow:
    """A flag of the command and what becomes of it.

    Attributes:
        flag: The flag with its values, as typed.
        kind: One of the words of this module.
        here: Flag of lmcore, or the reason.
    """

    flag: str
    kind: str
    here: str = ""


def flag_groups(flags: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with the words that follow it."""
    held: list[str] = []
    for word in flags:
        if _FLAG.match(word) and held:
            yield held
            held = []
        held.append(word)
    if held:
        yield held


def flag_rows(
    flags: Sequence[str],
    options: Mapping[str, Option],
    foreign: Mapping[str, ForeignFlag],
    places: Mapping[str, str] | None = None,
) -> list[FlagRow]:
    """Return what becomes of each flag, by itself; an earlier value of a repeated one is replaced.

    Args:
        flags: Arguments of the command.
        options: Options of lmcore's command.
        foreign: Known flags of the other program.
        places: Flags that are an argument without a flag here, with words for it.
    """
    anything = Positional("words", maximum=None)
    rows: list[FlagRow] = []
    repeated: dict[tuple[str, ...], list[int]] = {}
    for number, group in enumerate(flag_groups(flags)):
        text = shlex.join(group)
        if _name(group) in _OF_DEVICE and _name(group) in {one.flag for one in options.values()}:
            rows.append(FlagRow(text, OF_DEVICE, _OF_DEVICE[_name(group)]))
            continue
        if _name(group) in (places or {}):
            rows.append(FlagRow(text, RENAMED, (places or {})[_name(group)]))
            continue
        parsed = parse_flags(group, options, positionals=(anything,), foreign=foreign)
        if not _FLAG.match(group[0]):
            rows.append(FlagRow(text, UNKNOWN, "a word without a flag"))
        elif parsed.problems:
            rows.append(_problem(text, parsed.problems[0]))
        elif parsed.without_effect:
            rows.append(FlagRow(text, ALREADY, next(iter(parsed.without_effect.values()))))
        elif group == [ENGINE_FLAG]:
            rows.append(FlagRow(text, RENAMED, "--engine native, which takes the same file"))
        elif parsed.translated:
            rows.append(FlagRow(text, RENAMED, next(iter(parsed.translated.values()))))
        else:
            rows.append(FlagRow(text, SAME))
        if rows[-1].kind in {SAME, RENAMED}:
            setting = (_name(group).replace("--no-", "--", 1), *parsed.values)
            _mark_earlier(rows, repeated.setdefault(setting, []), text)
            repeated[setting].append(number)
    return rows


def _mark_earlier(rows: list[FlagRow], places: Sequence[int], text: str) -> None:
    """Mark the earlier values of a flag that *text* gives again: the last one counts."""
    for place in places:
        if rows[place].flag != text:
            rows[place] = FlagRow(rows[place].flag, AGAIN, f"the last value counts, {text}")


def _name(group: Sequence[str]) -> str:
    return group[0].partition("=")[0].replace("_", "-")


def _problem(text: str, problem: LmcoreError) -> FlagRow:
    hint = problem.hint or ""
    if "variables are not expanded" in f"{problem.what} {problem.why}":
        return FlagRow(text, OPEN)
    if isinstance(problem, UnsupportedFlagError):
        replaced = hint.startswith("use ")
        return FlagRow(text, REPLACED if replaced else NOT, hint.removeprefix("use "))
    if problem.what.startswith("unknown flag"):
        return FlagRow(text, UNKNOWN, problem.why or hint)
    parts = (problem.what, problem.why, hint)
    return FlagRow(text, WRONG, "; ".join(part for part in parts if part))


def print_table(rows: Sequence[FlagRow], stream: Any) -> None:
    """Print the rows and the number of each kind."""
    kinds = dict.fromkeys((SAME, RENAMED, ALREADY, *LEFT))
    counts = {kind: sum(row.kind == kind for row in rows) for kind in kinds}
    width = min(max([len(row.flag) for row in rows], default=0), _WIDEST)
    for row in rows:
        here = f"{row.kind}: {row.here}" if row.here else row.kind
        print(f"{printable(row.flag):<{width}}  {printable(here)}", file=stream)
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    print(f"\n{counted(len(rows), 'flag')}: {listed or 'none'}", file=stream)
