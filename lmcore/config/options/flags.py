"""Parser of flags: a single pass over the arguments that reports every problem.

Grammar: `--name value`, `--name=value`, `--name v1 v2` for lists (repeating the flag extends the
list), `--flag` and `--no-flag` (or `--flag true`) for switches.  Underscores in a flag count as
dashes, a negative number is a value, flags cannot be abbreviated, and `--` ends the flags.  A list
takes every word up to the next flag, so positional arguments precede it or follow `--`.  The last
value of a repeated flag counts, as with argparse; two flags that set one option differently are an
error.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import ConfigError, LmcoreError, begun, did_you_mean, nearest
from lmcore.config.option import Option
from lmcore.config.options.parsed_flags import ParsedFlags

__all__ = [
    "ForeignFlag",
    "ParsedFlags",
    "Positional",
    "Translation",
    "UnsupportedFlagError",
    "parse_flags",
]

CONFIG_FILES = "config.yaml"
"""Name of the positional argument for files of settings."""
_FILE_FLAGS = {"--args-file", "--cfg", "--config", "--config-file", "--yaml", "--yaml-cfg"}
_SYNONYMS = {
    "--beta1": "--adam-beta1",
    "--beta2": "--adam-beta2",
    "--block-size": "--seq-length",
    "--context-length": "--seq-length",
    "--device-type": "--device",
    "--dropout": "--hidden-dropout",
    "--dtype": "--precision",
    "--eps": "--adam-eps",
    "--gpus": "--nproc-per-node",
    "--grad-clip": "--clip-grad",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--learning-rate": "--lr",
    "--max-grad-norm": "--clip-grad",
    "--max-length": "--tokens",
    "--max-new-tokens": "--tokens",
    "--max-seq-len": "--seq-length",
    "--max-steps": "--train-iters",
    "--max-tokens": "--tokens",
    "--num-heads": "--num-attention-heads",
    "--num-steps": "--train-iters",
    "--output": "--save",
    "--resume": "--continue",
    "--resume-from": "--continue",
    "--resume-from-checkpoint": "--continue",
    "--seq-len": "--seq-length",
    "--steps": "--train-iters",
    "--warmup-steps": "--lr-warmup-iters",
    "--wd": "--weight-decay",
}
"""Flags of lmcore for names that other programs use, as suggestions."""

_LEAST_BEGINNING = 2
"""Number of letters of the beginning of a flag for which flags are suggested, at least."""
_SWITCH_WORDS = frozenset({"true", "false", "yes", "no", "on", "off"})
_FLAG_IN_TEXT = re.compile(r"--[a-z][a-z0-9-]+")


@dataclass(frozen=True)
class Positional:
    """Positional arguments: a name, and bounds on their number (`maximum` None: no limit)."""

    name: str
    help: str = ""
    minimum: int = 0
    maximum: int | None = 1


class UnsupportedFlagError(ConfigError):
    """A known flag of another program that has no equivalent here.

    Attributes:
        alone: True if the whole command is another program's, so that no other problem matters.
    """

    alone: bool = False


@dataclass(frozen=True)
class Translation:
    """Meaning of another program's flag here: flags of lmcore, no effect, or a problem.

    Attributes:
        flags: Flags of lmcore with the same meaning, with their values.
        no_effect: Reason why the flag changes nothing; None if it has a meaning.
        problem: Error if the flag or its value is not supported.
        yields: True if lmcore's own flag counts if both are given.
        replaces: Earlier flag of the same meaning as typed, whose value this one replaces.
    """

    flags: tuple[str, ...] = ()
    no_effect: str | None = None
    problem: ConfigError | None = None
    yields: bool = False
    replaces: str | None = None


@dataclass(frozen=True)
class ForeignFlag:
    """A known flag of another program.

    Attributes:
        values: Number of values: "0", "1", "?" (none or one), "+" (one or more) or "*" (any).
        translate: Function from the values as typed to their meaning here.
        replacement: Flag of lmcore that replaces it, for messages; None if there is none.
        its_values: Values that tell it from an option here of the same name, in upper case.
    """

    values: str
    translate: Callable[[tuple[str, ...]], Translation]
    replacement: str | None = None
    its_values: Collection[str] = ()


@dataclass(frozen=True)
class _Given:
    """One occurrence of a flag: its values, the text as typed, and its name without `no-`."""

    values: tuple[str, ...]
    text: str
    name: str
    yields: bool = False


def parse_flags(
    argv: Sequence[str],
    options: Mapping[str, Option],
    *,
    positionals: Sequence[Positional] = (),
    foreign: Mapping[str, ForeignFlag] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> ParsedFlags:
    """Parse arguments; every problem of what the user typed is in the result.

    Args:
        argv: Arguments after the name of the command.
        options: Options that may be given, by name.
        positionals: Positional arguments in order.
        foreign: Known flags of other programs, by flag.
        reasons: Reasons why flags are unknown, by their prefix.

    Raises:
        UnsupportedFlagError: A flag shows that the command is another program's.
    """
    parser = _Parser(options, foreign or {}, reasons or {}, positionals)
    parser.read(argv)
    for problem in parser.problems:
        if isinstance(problem, UnsupportedFlagError) and problem.alone:
            raise problem
    values, texts = parser.convert()
    placed = _place(parser.words, positionals, parser.problems, strict=not parser.skipped)
    return ParsedFlags(
        values,
        texts,
        placed,
        parser.translated,
        parser.without_effect,
        tuple(parser.repeated),
        parser.replaced,
        tuple(parser.problems),
        frozenset(parser.unread),
    )


class _Parser:
    """State of one pass: the words given for each option, and the problems so far."""

    def __init__(
        self,
        options: Mapping[str, Option],
        foreign: Mapping[str, ForeignFlag],
        reasons: Mapping[str, str],
        positionals: Sequence[Positional],
    ) -> None:
        self.options = options
        self.files = next((item for item in positionals if item.name == CONFIG_FILES), None)
        self.foreign = foreign
        self.reasons = reasons
        self.by_flag = {option.flag: option for option in options.values()}
        self.negated = {
            f"--no-{option.flag[2:]}": option
            for option in options.values()
            if option.type is bool and f"--no-{option.flag[2:]}" not in self.by_flag
        }
        self.given: dict[str, list[_Given]] = {}
        self.words: list[str] = []
        self.translated: dict[str, str] = {}
        self.without_effect: dict[str, str] = {}
        self.repeated: list[str] = []
        self.replaced: dict[str, tuple[str, ...]] = {}
        self.problems: list[LmcoreError] = []
        self.unread: set[str] = set()
        self.is_foreign = False  # flags of another program were given
        self.skipped = False  # words after an unknown flag, which may have been positionals

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

    def _flag(
        self,
        token: str,
        rest: deque[str],
        *,
        origin: str | None = None,
        yields: bool = False,
    ) -> None:
        name, equals, attached = token.partition("=")
        name = name.replace("_", "-")
        inline = (attached,) if equals else None
        if name in self.by_flag and not self._means_another(name, inline, rest):
            option = self.by_flag[name]
            arity = "+" if option.repeated else "1"
            values = self._values(arity, inline, rest, switch=option.type is bool)
            self._give(option, name, values, origin, yields=yields)
        elif name in self.negated:
            self._negation(name, inline, origin)
        elif name in self.foreign:
            self._foreign(name, inline, rest)
        else:
            self._unknown(name, rest)

    def _means_another(self, name: str, inline: tuple[str, ...] | None, rest: deque[str]) -> bool:
        """Return True for a value that another program's flag of this name has, and ours not.

        Every other value is ours, also one that is unknown: it may be a slip for a choice.
        """
        value = inline[0] if inline else next(iter(rest), "")
        return name in self.foreign and value.upper() in self.foreign[name].its_values

    def _values(
        self, arity: str, inline: tuple[str, ...] | None, rest: deque[str], *, switch: bool = False
    ) -> tuple[str, ...]:
        """Return the values of a flag, at most as many as it takes."""
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
        self,
        option: Option,
        name: str,
        values: tuple[str, ...],
        origin: str | None,
        *,
        yields: bool,
    ) -> None:
        if not values and option.type is not bool:
            what = f"`{origin or name}` needs a value"
            self.problems.append(ConfigError(what, why=option.expected))
            self.unread.add(option.name)
            return
        text = origin or " ".join((name, *(value or '""' for value in values)))
        typed = origin.partition(" ")[0] if origin else name
        item = _Given(values or ("true",), text, typed, yields)
        self.given.setdefault(option.name, []).append(item)

    def _negation(self, name: str, inline: tuple[str, ...] | None, origin: str | None) -> None:
        option = self.negated[name]
        if inline is not None:
            what = f"`{name}={inline[0]}`: a `--no-` flag takes no value"
            self.problems.append(ConfigError(what, hint=f"write `{name}` or `{option.flag}`"))
            self.unread.add(option.name)
            return
        typed = origin.partition(" ")[0] if origin else option.flag
        item = _Given(("false",), origin or name, typed)
        self.given.setdefault(option.name, []).append(item)

    def _foreign(self, name: str, inline: tuple[str, ...] | None, rest: deque[str]) -> None:
        flag = self.foreign[name]
        self.is_foreign = True
        values = self._values(flag.values, inline, rest)
        if flag.values == "0" and values:
            self.problems.append(ConfigError(f"`{name}={values[0]}`: `{name}` takes no value"))
            self._hide(flag.replacement or "")
            return
        if flag.values in {"1", "+"} and not values:
            self.problems.append(ConfigError(f"`{name}` needs a value"))
            self._hide(flag.replacement or "")
            return
        text = " ".join((name, *values))
        translation = flag.translate(values)
        if translation.problem is not None:
            self.problems.append(translation.problem)
        if translation.no_effect is not None:
            self.without_effect[text] = translation.no_effect
        if translation.replaces is not None:
            self.without_effect.pop(translation.replaces, None)
            earlier = self.replaced.pop(translation.replaces, ())
            self.replaced[text] = (*earlier, translation.replaces)
        if translation.flags:
            self.translated[text] = " ".join(translation.flags)
        flags = deque(translation.flags)
        while flags:
            self._flag(flags.popleft(), flags, origin=text, yields=translation.yields)

    def _unknown(self, name: str, rest: deque[str]) -> None:
        while rest and self._is_value(rest[0]):
            rest.popleft()
            self.skipped = True
        plain = f"--{name.removeprefix('--no-').removeprefix('--')}"
        for start, why in self.reasons.items():
            if plain.startswith(start):
                hint = "leave the flag out; `lmcore plugins` shows every plugin's state"
                self.problems.append(ConfigError(f"unknown flag `{name}`", why=why, hint=hint))
                return
        hint = self._meant(name) or "`--help` lists the flags"
        self.problems.append(ConfigError(f"unknown flag `{name}`", hint=hint))
        self._hide(hint)

    def _hide(self, text: str) -> None:
        """Count the options of the flags in *text*, which may have been meant, as not read."""
        for flag in _FLAG_IN_TEXT.findall(text):
            option = self.by_flag.get(flag) or self.negated.get(flag)
            if option is not None:
                self.unread.add(option.name)

    def _meant(self, name: str) -> str | None:
        """Return a hint that names the flags of this command that *name* may mean, if any.

        It may be a slip for a flag, or the beginning of some, as flags are written in full.  No
        flag is suggested that turns off what *name* turns on, or the reverse, nor one of another
        program that is refused or without effect here.
        """
        if name in _FILE_FLAGS and self.files is not None:
            return f"write the path of a {self.files.help} without a flag"
        close = _SYNONYMS.get(name)
        if close in self.by_flag:
            return f"did you mean `{close}`?"
        negative = name.startswith("--no-")
        renamed = {flag: one.replacement for flag, one in self.foreign.items() if one.replacement}
        known = [*self.by_flag, *self.negated, *renamed, "--help"]
        known = [flag for flag in known if flag.startswith("--no-") == negative]
        name = name if name.startswith("--") else f"-{name}"
        close = nearest(name, known)
        longer = self._begun(name)
        if longer and close not in renamed:
            others = [] if close is None or close.startswith(name) else [close]
            return did_you_mean([*others, *longer])
        if close is None:
            return None
        here = f", which is `{renamed[close]}` here" if close in renamed else ""
        return f"did you mean `{close}`{here}?"

    def _begun(self, name: str) -> list[str]:
        """Return the flags that begin with *name*, the first ones if there are many."""
        stem = name.removeprefix("--no-").removeprefix("--")
        if len(stem) < _LEAST_BEGINNING:
            return []
        flags = self.negated if name.startswith("--no-") else self.by_flag
        return begun(name, flags)

    def convert(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return values and texts by option name; add conflicts and wrong types to the problems."""
        values: dict[str, Any] = {}
        texts: dict[str, str] = {}
        for name, every in self.given.items():
            option, given = self.options[name], self._counting(every)
            try:
                if option.repeated:
                    values[name] = self._joined(option, given)
                    texts[name] = " ".join(item.text for item in given)
                else:
                    values[name], texts[name] = self._one(option, given)
            except ConfigError as problem:
                self.problems.append(problem)
                self.unread.add(name)
        return values, texts

    def _counting(self, given: list[_Given]) -> list[_Given]:
        """Return the occurrences that do not yield to another flag."""
        own = [item for item in given if not item.yields]
        if not own or len(own) == len(given):
            return given
        for item in given:
            if item.yields:
                self.translated.pop(item.text, None)
                self.without_effect[item.text] = f"`{own[-1].text}` is given"
        return own

    def _joined(self, option: Option, given: Sequence[_Given]) -> Any:
        words = [word for item in given for word in item.values]
        empty = len(words) == 1 and words[0].lower() == "none"
        texts = [item.text for item in given]
        if len(given) > 1 and self.is_foreign:
            joined = " and ".join(f"`{text}`" for text in texts)
            self.repeated.append(f"{joined} are joined: a list is extended")
        return option.convert(None if empty else words, where=f"`{' '.join(texts)}`")

    def _one(self, option: Option, given: Sequence[_Given]) -> tuple[Any, str]:
        """Return the value of an option and the text that gives it.

        Raises:
            ConfigError: A value is wrong, or flags of different names contradict each other.
        """
        converted = [option.convert(item.values[0], where=f"`{item.text}`") for item in given]
        # argparse has one destination for each name: the later value of a name replaces the earlier
        latest = {item.name: (one, item) for item, one in zip(given, converted, strict=True)}
        value, last = converted[-1], given[-1]
        if all(one == value for one, _ in latest.values()):
            replaced = dict.fromkeys(
                item.text for item, one in zip(given, converted, strict=True) if one != value
            )
            if replaced:
                self.replaced[last.text] = tuple(replaced)
                for text in replaced:
                    self.translated.pop(text, None)
            return value, last.text
        raise ConfigError(
            f"`{option.flag}` is given more than once, with different values",
            why="found " + " and ".join(f"`{item.text}`" for _, item in latest.values()),
            hint="keep one of them",
        )


def _is_flag(token: str) -> bool:
    return len(token) > 1 and token[0] == "-" and not (token[1].isdigit() or token[1] == ".")


def _place(
    words: Sequence[str],
    positionals: Sequence[Positional],
    problems: list[LmcoreError],
    *,
    strict: bool,
) -> dict[str, tuple[str, ...]]:
    placed: dict[str, tuple[str, ...]] = {}
    rest = list(words)
    enough = len(rest) >= sum(positional.minimum for positional in positionals)
    for index, positional in enumerate(positionals):
        reserved = sum(later.minimum for later in positionals[index + 1 :])
        free = max(len(rest) - reserved, 0) if enough else len(rest)
        count = free if positional.maximum is None else min(free, positional.maximum)
        placed[positional.name], rest = tuple(rest[:count]), rest[count:]
        if count < positional.minimum and strict:
            what = f"missing argument `{positional.name}`"
            problems.append(ConfigError(what, hint=positional.help or None))
    for word in rest:
        hint = (
            "flags start with `--`; a list of values follows its flag"
            if positionals
            else "this command takes no subcommand or name, only flags: `--help` lists them"
        )
        problems.append(ConfigError(f"unexpected argument `{word}`", hint=hint))
    return placed
