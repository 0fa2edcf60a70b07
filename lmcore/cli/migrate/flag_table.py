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
from lmcore.config.options.parsed_flags import ParsedFlags

__all__ = ["LEFT", "FlagRow", "flag_groups", "flag_rows", "print_table"]

_FLAG = re.compile(r"--?[A-Za-z]")
_WIDEST = 44
_ANYTHING = Positional("words", maximum=None)
_OF_DEVICE = {
    "--distributed-backend": "the device's own backend is the default; `lmcore train` with the "
    "flag asks for another"
}
"""Flags whose values belong to the script's device, with the reason to leave them out."""

SAME, RENAMED, ALREADY = "same", "renamed", "already so"
REPLACED, NOT, UNKNOWN, WRONG = "replaced by", "not supported", "unknown", "wrong value"
OPEN, AGAIN, LEFT_OUT = "has no value", "given again", "left out"
LEFT = (REPLACED, NOT, UNKNOWN, WRONG, OPEN, AGAIN, LEFT_OUT)
"""Kinds of flags that the result does not have."""


@dataclass(frozen=True)
class FlagRow:
    """A flag of the command and what becomes of it.

    Attributes:
        flag: The flag with its values, as typed.
        kind: One of the words of this module.
        here: Flag of lmcore, or the reason.
        words: Words of the command that the result takes from the row.
    """

    flag: str
    kind: str
    here: str = ""
    words: Sequence[str] = ()


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
    *,
    has_arguments: bool = False,
) -> list[FlagRow]:
    """Return what becomes of each flag, by itself; an earlier value of a repeated one is replaced.

    Args:
        flags: Arguments of the command.
        options: Options of lmcore's command.
        foreign: Known flags of the other program.
        places: Flags that are an argument without a flag here, with words for it.
        has_arguments: True if the other program has arguments without a flag, which may be
            anywhere; otherwise each is a row by itself.
    """
    rows: list[FlagRow] = []
    repeated: dict[tuple[str, ...], list[int]] = {}
    for group, before in _groups(flags, options, foreign, has_arguments=has_arguments):
        if before:
            rows.append(FlagRow(shlex.join(group), LEFT_OUT, f"no value of `{before}`", group))
            continue
        parsed = parse_flags(group, options, positionals=(_ANYTHING,), foreign=foreign)
        kind, here = _fate(group, parsed, options, places or {})
        rows.append(FlagRow(shlex.join(group), kind, here, group))
        if kind in {SAME, RENAMED} and _name(group) not in (places or {}):
            setting = (_name(group).replace("--no-", "--", 1), *parsed.values)
            _mark_earlier(rows, repeated.setdefault(setting, []), rows[-1].flag)
            repeated[setting].append(len(rows) - 1)
    return rows


def _groups(
    flags: Sequence[str],
    options: Mapping[str, Option],
    foreign: Mapping[str, ForeignFlag],
    *,
    has_arguments: bool,
) -> Iterator[tuple[list[str], str]]:
    """Yield each flag with its values, and each word that is no value of the flag before it.

    The second element is that flag for such a word, else empty.
    """
    for group in flag_groups(flags):
        strays: Sequence[str] = ()
        if _FLAG.match(group[0]) and not has_arguments:
            parsed = parse_flags(group, options, positionals=(_ANYTHING,), foreign=foreign)
            strays = parsed.positionals[_ANYTHING.name]
        yield group[: len(group) - len(strays)], ""
        yield from (([one], group[0].partition("=")[0]) for one in strays)


def _fate(
    group: Sequence[str],
    parsed: ParsedFlags,
    options: Mapping[str, Option],
    places: Mapping[str, str],
) -> tuple[str, str]:
    """Return the kind of a flag's row, and the flag of lmcore or the reason."""
    name = _name(group)
    if name in _OF_DEVICE and name in {one.flag for one in options.values()}:
        return LEFT_OUT, _OF_DEVICE[name]
    if name in places:
        return RENAMED, places[name]
    if not _FLAG.match(group[0]):
        return UNKNOWN, "a word without a flag"
    if not parsed.problems:
        return _taken(group, parsed)
    kind, here = _problem(parsed.problems[0])
    is_open = kind == WRONG and any(sign in word for word in group for sign in "$`")
    return (OPEN, "") if is_open else (kind, here)


def _taken(group: Sequence[str], parsed: ParsedFlags) -> tuple[str, str]:
    """Return the same for a flag without a problem."""
    if parsed.without_effect:
        return ALREADY, next(iter(parsed.without_effect.values()))
    if list(group) == [ENGINE_FLAG]:
        return RENAMED, "--engine native, which takes the same file"
    if parsed.translated:
        return RENAMED, next(iter(parsed.translated.values()))
    return SAME, ""


def _mark_earlier(rows: list[FlagRow], places: Sequence[int], text: str) -> None:
    """Mark the earlier values of a flag that *text* gives again: the last one counts."""
    for place in places:
        if rows[place].flag != text:
            here = f"the last value counts, {text}"
            rows[place] = FlagRow(rows[place].flag, AGAIN, here, rows[place].words)


def _name(group: Sequence[str]) -> str:
    return group[0].partition("=")[0].replace("_", "-")


def _problem(problem: LmcoreError) -> tuple[str, str]:
    """Return the kind of the row of a flag with a problem, and the reason."""
    hint = problem.hint or ""
    if "variables are not expanded" in f"{problem.what} {problem.why}":
        return OPEN, ""
    if isinstance(problem, UnsupportedFlagError):
        replaced = hint.startswith("use ")
        return REPLACED if replaced else NOT, hint.removeprefix("use ")
    if problem.what.startswith("unknown flag"):
        return UNKNOWN, problem.why or hint
    parts = (problem.what, problem.why, hint)
    return WRONG, "; ".join(part for part in parts if part)


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
