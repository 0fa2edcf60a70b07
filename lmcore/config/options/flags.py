"""Flags from options: one pass over the arguments that reports every problem, not the first.

Grammar: `--name value`, `--name=value`, `--name v1 v2` for lists (given again, a list grows),
`--flag` and `--no-flag` (or `--flag true`) for switches.  Underscores in a flag count as dashes, a
negative number is a value, nothing is abbreviated, and `--` ends the flags.  A list takes every
word up to the next flag, so positional arguments stand before it or after `--`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcore.config.option import Option
from lmcore.errors import ConfigError, LmcoreError, nearest

__all__ = [
    "ForeignFlag",
    "ParsedFlags",
    "Positional",
    "Translation",
    "UnsupportedFlagError",
    "parse_flags",
]

_SWITCH_WORDS = frozenset({"true", "false", "yes", "no", "on", "off"})


@dataclass(frozen=True)
class Positional:
    """Arguments without a flag: a name, and how many there must be (`maximum` None: no limit)."""

    name: str
    help: str = ""
    minimum: int = 0
    maximum: int | None = 1


class UnsupportedFlagError(ConfigError):
    """A flag of another program that is known here and has no equivalent."""


@dataclass(frozen=True)
class Translation:
    """What becomes of another program's flag: flags of today, a notice, or a problem."""

    flags: tuple[str, ...] = ()
    notice: str | None = None
    problem: ConfigError | None = None


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another program that is understood here.

    Attributes:
        values: How many it takes: "0", "1", "?" (none or one), "+" (one or more) or "*" (any).
        translate: From the values as typed to what they mean here.
        today: The flag that replaces it, for messages; None when there is none.
    """

    values: str
    translate: Callable[[tuple[str, ...]], Translation]
    today: str | None = None


@dataclass(frozen=True)
class ParsedFlags:
    """The outcome of one pass over the arguments.

    Attributes:
        values: Converted value by option name, of the options that were given.
        texts: The same options as typed: "--lr 1e-3".
        positionals: Words without a flag by positional name; () where there are none.
        notices: One line for each foreign flag that was understood.
        problems: Everything wrong; `values` holds only what is right.
    """

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    positionals: Mapping[str, tuple[str, ...]]
    notices: tuple[str, ...]
    problems: tuple[LmcoreError, ...]


@dataclass(frozen=True)
class _Given:
    values: tuple[str, ...]
    text: str


def parse_flags(
    argv: Sequence[str],
    options: Mapping[str, Option],
    *,
    positionals: Sequence[Positional] = (),
    foreign: Mapping[str, ForeignFlag] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> ParsedFlags:
    """Read *argv* against *options*; never raises for what the user typed.

    Args:
        argv: The arguments after the command's name.
        options: What may be given, by name.
        positionals: What the words without a flag are, in order.
        foreign: Flags of other programs that are accepted, by flag.
        reasons: Why flags are unknown, by what they begin with.
    """
    parser = _Parser(options, foreign or {}, reasons or {})
    parser.read(argv)
    values, texts = parser.convert()
    placed = _place(parser.words, positionals, parser.problems, strict=not parser.lost)
    return ParsedFlags(values, texts, placed, tuple(parser.notices), tuple(parser.problems))


class _Parser:
    """State of one pass: what was given, by option, and what was wrong."""

    def __init__(
        self,
        options: Mapping[str, Option],
        foreign: Mapping[str, ForeignFlag],
        reasons: Mapping[str, str],
    ) -> None:
        self.options = options
        self.foreign = foreign
        self.reasons = reasons
        self.by_flag = {one.flag: one for one in options.values()}
        self.by_flag |= {f"-{one.short}": one for one in options.values() if one.short}
        self.negated = {
            f"--no-{one.flag[2:]}": one
            for one in options.values()
            if one.type is bool and f"--no-{one.flag[2:]}" not in self.by_flag
        }
        self.given: dict[str, list[_Given]] = {}
        self.words: list[str] = []
        self.notices: list[str] = []
        self.problems: list[LmcoreError] = []
        self.lost = False  # an unknown flag may have swallowed a positional word

    def read(self, argv: Iterable[str]) -> None:
        rest = deque(argv)
        while rest:
            token = rest.popleft()
            if token == "--":
                self.words.extend(rest)
                return
            if _is_flag(token):
                self._flag(token, rest)
            else:
                self.words.append(token)

    def _flag(self, token: str, rest: deque[str], *, origin: str | None = None) -> None:
        name, equals, attached = token.partition("=")
        name = name.replace("_", "-")
        inline = (attached,) if equals else None
        if name in self.by_flag:
            one = self.by_flag[name]
            values = self._values(_arity(one), inline, rest, switch=one.type is bool)
            self._give(one, name, values, origin)
        elif name in self.negated:
            self._negation(name, inline, origin)
        elif name in self.foreign:
            self._foreign(name, inline, rest)
        else:
            self._unknown(name, rest)

    def _values(
        self, arity: str, inline: tuple[str, ...] | None, rest: deque[str], *, switch: bool = False
    ) -> tuple[str, ...]:
        """Return the words that belong to a flag, at most as many as it takes."""
        if inline is not None:
            return inline
        if switch:
            return (rest.popleft(),) if rest and rest[0].lower() in _SWITCH_WORDS else ()
        taken: list[str] = []
        limit = {"0": 0, "1": 1, "?": 1}.get(arity)
        while rest and (limit is None or len(taken) < limit) and self._is_value(rest[0]):
            taken.append(rest.popleft())
        return tuple(taken)

    def _is_value(self, token: str) -> bool:
        if token == "--" or token.partition("=")[0] in self.by_flag or token == "-h":
            return False
        return not (token.startswith("--") and token[2:3].isalpha())

    def _give(
        self, one: Option, name: str, values: tuple[str, ...], origin: str | None = None
    ) -> None:
        if not values and one.type is not bool:
            self.problems.append(ConfigError(f"`{origin or name}` needs a value", why=one.wanted))
            return
        text = origin or " ".join((name, *values))
        self.given.setdefault(one.name, []).append(_Given(values or ("true",), text))

    def _negation(self, name: str, inline: tuple[str, ...] | None, origin: str | None) -> None:
        one = self.negated[name]
        if inline is not None:
            what = f"`{name}={inline[0]}`: a `--no-` flag takes no value"
            self.problems.append(ConfigError(what, hint=f"write `{name}` or `{one.flag}`"))
            return
        self.given.setdefault(one.name, []).append(_Given(("false",), origin or name))

    def _foreign(self, name: str, inline: tuple[str, ...] | None, rest: deque[str]) -> None:
        flag = self.foreign[name]
        values = self._values(flag.values, inline, rest)
        if flag.values == "0" and values:
            self.problems.append(ConfigError(f"`{name}={values[0]}`: `{name}` takes no value"))
            return
        if flag.values in {"1", "+"} and not values:
            self.problems.append(ConfigError(f"`{name}` needs a value"))
            return
        text = " ".join((name, *values))
        translation = flag.translate(values)
        if translation.problem is not None:
            self.problems.append(translation.problem)
        if translation.notice is not None:
            self.notices.append(translation.notice)
        flags = deque(translation.flags)
        while flags:
            self._flag(flags.popleft(), flags, origin=text)

    def _unknown(self, name: str, rest: deque[str]) -> None:
        while rest and self._is_value(rest[0]):
            rest.popleft()
            self.lost = True
        plain = f"--{name.removeprefix('--no-').removeprefix('--')}"
        for start, why in self.reasons.items():
            if plain.startswith(start):
                hint = "leave the flag out; `lmcore plugins` shows every plugin's state"
                self.problems.append(ConfigError(f"unknown flag `{name}`", why=why, hint=hint))
                return
        known = [*self.by_flag, *self.negated, *self.foreign, "--help"]
        close = nearest(name if name.startswith("--") else f"-{name}", known)
        today = self.foreign[close].today if close is not None and close in self.foreign else None
        now = f", today `{today}`" if today else ""
        hint = f"did you mean `{close}`{now}?" if close else "`--help` lists the flags"
        self.problems.append(ConfigError(f"unknown flag `{name}`", hint=hint))

    def convert(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return values and texts by option name, conflicts and wrong types among the problems."""
        values: dict[str, Any] = {}
        texts: dict[str, str] = {}
        for name, given in self.given.items():
            one = self.options[name]
            try:
                values[name] = _combine(one, given)
                texts[name] = (
                    " ".join(item.text for item in given) if one.repeated else given[-1].text
                )
            except ConfigError as problem:
                self.problems.append(problem)
        return values, texts


def _is_flag(token: str) -> bool:
    return len(token) > 1 and token[0] == "-" and not (token[1].isdigit() or token[1] == ".")


def _arity(one: Option) -> str:
    return "+" if one.repeated else "1"


def _combine(one: Option, given: Sequence[_Given]) -> Any:
    if one.repeated:
        words = [word for item in given for word in item.values]
        return one.convert(words, where=f"`{' '.join(item.text for item in given)}`")
    converted = [one.convert(item.values[0], where=f"`{item.text}`") for item in given]
    if any(value != converted[0] for value in converted):
        texts = " and ".join(f"`{item.text}`" for item in given)
        raise ConfigError(
            f"`{one.flag}` is given more than once, with different values",
            why=f"found {texts}",
            hint="keep one of them",
        )
    return converted[-1]


def _place(
    words: Sequence[str],
    positionals: Sequence[Positional],
    problems: list[LmcoreError],
    *,
    strict: bool,
) -> dict[str, tuple[str, ...]]:
    placed: dict[str, tuple[str, ...]] = {}
    rest = list(words)
    for index, one in enumerate(positionals):
        reserved = sum(later.minimum for later in positionals[index + 1 :])
        free = max(len(rest) - reserved, 0)
        count = free if one.maximum is None else min(free, one.maximum)
        placed[one.name], rest = tuple(rest[:count]), rest[count:]
        if count < one.minimum and strict:
            problems.append(ConfigError(f"missing argument `{one.name}`", why=one.help or None))
    for word in rest:
        hint = "flags start with `--`; a list of values follows its flag" if positionals else None
        problems.append(ConfigError(f"unexpected argument `{word}`", hint=hint))
    return placed
