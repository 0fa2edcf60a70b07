"""Declaration of a setting: one field gives its flag, file key, help, bounds and docs row.

A section is a frozen dataclass whose fields are made with `option`.  Flags, YAML keys,
`lmcore config show` and the reference page are derived from the fields by `options_of`.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from lmcore.base.errors import ConfigError, did_you_mean, nearest, suggestion
from lmcore.config.need import Need

__all__ = [
    "CHECKED",
    "CORPORA",
    "DROPOUT",
    "FREE",
    "INPUT_PATH",
    "NAMED",
    "OUTPUT_PATH",
    "PREFIXES",
    "RANGES",
    "REQUIRED",
    "SCRIPTS",
    "SETS",
    "Option",
    "flag_of",
    "is_option",
    "option",
    "options_of",
    "refuse_unexpanded",
]

REQUIRED = dataclasses.MISSING
"""The default of an option that must be given."""

FREE = "free"
"""`on_resume` of a setting that does not change what a run computes."""

DROPOUT = "dropout"
"""`on_resume` of a setting that chooses kernels or compiled code, which may draw other random
numbers for dropout: a change is named in a warning if the run has dropout, and free otherwise."""

CHECKED = "checked"
"""`on_resume` of a setting whose effect is compared with the checkpoint's: the model's shape, the
learning-rate schedule, the order of the samples, the tokenizer or the optimizer.  A difference is
an error unless a flag allows it."""

INPUT_PATH, OUTPUT_PATH, PREFIXES, RANGES = "input", "output", "prefixes", "ranges"
NAMED, SCRIPTS, SETS, CORPORA = "named", "scripts", "sets", "corpora"
"""`paths` of an option: a path to read, a path to write, a list of dataset prefixes with or without
weights, texts "NAME: WEIGHT START:END PREFIX, ...", paths or texts "NAME=PATH", names and paths of
Python files, names, paths of texts and "NAME=PREFIX", or corpora files and "NAME=PATH"."""

_KEY = "lmcore.option"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

_LARGEST = 10**12
"""Largest absolute value of an integer whose option has no other bound: no count, size or
interval of a run is larger, and products of two such values stay far from infinity."""

_PATHS = frozenset({"FILE", "DIR", "PATH", "PREFIX"})
"""Placeholders of values that are paths."""

_LONGEST_SHOWN = 80
"""Largest number of characters of a path in a message."""
_MOST_DIRECTORIES = 250
"""Largest number of directories within each other; Python recurses to make them."""

_ONE = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_SEVERAL = {bool: "true or false", int: "integers", float: "numbers", str: "texts"}


def option(
    default: Any,
    help: str,  # noqa: A002 - the common name of the text
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: Sequence[str] | None = None,
    form: str | None = None,
    metavar: str | None = None,
    aliases: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    on_resume: str = "warn",
    needs: Need | tuple[Need, ...] = (),
    paths: str | None = None,
    one_start: bool = False,
    may_be_empty: bool = False,
) -> Any:
    """Return a dataclass field for one setting.

    Args:
        default: Value if no source gives one; `None` means "derived" or "off", as the help says;
            `REQUIRED`: the option has no default.
        help: One sentence for `--help` and the reference page, with the unit.
        minimum, above: Inclusive and exclusive lower bound.
        maximum, below: Inclusive and exclusive upper bound.
        choices: Allowed words, if the set is closed.
        form: Pattern with a colon of the values that are allowed besides the choices.
        metavar: Placeholder of the value in the help; default: from the type.
        aliases: Other spellings of choices, each with the choice that it means.
        refused: Values of other programs that have no equal here, each with the hint for it.
        on_resume: Consequence of a value that differs from the checkpoint's when a run resumes:
            `FREE`, `DROPOUT`, `CHECKED`, or "warn", which names the change in a warning.
        needs: Conditions under which the setting has an effect; default: always.
        paths: Form of the paths in the value: `INPUT_PATH`, `OUTPUT_PATH`, `PREFIXES`, `RANGES`,
            `NAMED`, `SCRIPTS`, `SETS` or `CORPORA`; in a file they are relative to the file.
        one_start: True if the option is for one start only: a run's `config.yaml` does not set it.
        may_be_empty: True if an empty text is a value, as it always is if it is the default.
    """
    declared = {
        "help": help,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
        "choices": tuple(choices) if choices else None,
        "form": form,
        "metavar": metavar,
        "aliases": aliases,
        "refused": refused,
        "on_resume": on_resume,
        "needs": (needs,) if isinstance(needs, Need) else needs,
        "paths": paths,
        "one_start": one_start,
        "may_be_empty": may_be_empty or default == "",
    }
    return dataclasses.field(default=default, metadata={_KEY: declared})


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting, derived from a field of a section.

    Attributes:
        name: Unique name: the field's name, `train_iters`; for a plugin's option prefixed with the
            name of its section.
        section: Name of the section, `training`.
        type: Type of the value without `None`: bool, int, float or str.
        repeated: True if the value is a tuple of `type`.
        optional: True if `None` is allowed.
        plugin: Name of the plugin that declares the option; empty for the core's.
        on_resume: Consequence of a changed value when a run resumes; see `option`.
        needs: Conditions under which the setting has an effect; empty: always.
        paths: Form of the paths in the value; see `option`.
        one_start: True if the option is for one start only; see `option`.
        may_be_empty: True if an empty text is a value; see `option`.
    """

    name: str
    section: str
    type: type
    repeated: bool
    optional: bool
    default: Any
    help: str
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    plugin: str = ""
    form: str | None = None
    aliases: Mapping[str, str] | None = None
    refused: Mapping[str, str] | None = None
    on_resume: str = "warn"
    needs: tuple[Need, ...] = ()
    paths: str | None = None
    one_start: bool = False
    may_be_empty: bool = False

    @property
    def key(self) -> str:
        """The name of the field, which is the key in the section of a file."""
        return self.name.removeprefix(f"{self.section}_") if self.plugin else self.name

    @property
    def flag(self) -> str:
        """The long flag, `--train-iters`."""
        return flag_of(self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """Every long flag of the option; a switch has one that turns it off."""
        return (self.flag, f"--no-{self.flag[2:]}") if self.type is bool else (self.flag,)

    @property
    def required(self) -> bool:
        """True if a value must be given."""
        return self.default is REQUIRED

    @property
    def expected(self) -> str:
        """Type and bounds of the option in words, for messages: "expected a number > 0"."""
        if self.choices:
            return f"expected {self.bound}"
        kind = (_SEVERAL if self.repeated else _ONE)[self.type]
        return f"expected {kind} {self.bound}".rstrip()

    @property
    def bound(self) -> str:
        """The allowed range in words; empty if there is no bound."""
        if self.choices:
            more = f", or {self.form}" if self.form else ""
            return "one of " + ", ".join(self.choices) + more
        low = f">= {_digits(self.minimum)}" if self.minimum is not None else ""
        low = f"> {_digits(self.above)}" if self.above is not None else low
        high = f"<= {_digits(self.maximum)}" if self.maximum is not None else ""
        high = f"< {_digits(self.below)}" if self.below is not None else high
        return " and ".join(part for part in (low, high) if part)

    @property
    def type_name(self) -> str:
        """The type in words, for the docs: "number", "list of integers"."""
        if self.repeated:
            return f"list of {_SEVERAL[self.type]}"
        return _ONE[self.type].removeprefix("an ").removeprefix("a ")

    def convert(self, value: Any, *, where: str) -> Any:
        """Return *value* as this option's type, with its bounds checked.

        Args:
            value: A string, a list of strings, or a value of a YAML file.
            where: The option as the user wrote it, for messages: "`--lr -1`".

        Raises:
            ConfigError: The type or the range is wrong.
        """
        if isinstance(value, str) and value.lower() in {"none", "null"}:
            value = None if self.optional or self.repeated else value
        if value is None:
            if self.optional:
                return None
            if self.repeated and not self.required:
                return ()
            raise ConfigError(f"{where}: `{self.name}` cannot be empty", why=self.expected)
        if isinstance(value, (list, tuple)) and not self.repeated:
            hint = "write the value without brackets" if len(value) == 1 else None
            one = _ONE[self.type].removeprefix("an ").removeprefix("a ")
            raise ConfigError(
                f"{where}: must be one {one}, got a list", why=self.expected or None, hint=hint
            )
        if self.repeated:
            items = [value] if isinstance(value, str) else value
            if not isinstance(items, (list, tuple)):
                raise ConfigError(f"{where}: not a list", why=self.expected)
            return tuple(self._convert_item(item, where) for item in items)
        return self._convert_item(value, where)

    def _convert_item(self, value: Any, where: str) -> Any:
        try:
            converted = _CONVERTERS[self.type](value)
        except (ValueError, TypeError, OverflowError):
            bound = f" {self.bound}" if self.bound else ""
            raise ConfigError(f"{where}: expected {_ONE[self.type]}{bound}") from None
        if self.type is str and not converted.strip() and not self.may_be_empty:
            what = f"{where}: the {'path' if self.paths else 'value'} is empty"
            left_out = "" if self.required else "leave it out for its default; "
            hint = f"{left_out}a shell variable may be unset"
            raise ConfigError(what, why=self.expected if self.choices else None, hint=hint)
        if self.choices is not None and converted not in self.choices:
            converted = (self.aliases or {}).get(str(converted).lower(), converted)
            same = [word for word in self.choices if word.lower() == str(converted).lower()]
            converted = same[0] if same else converted
        if self.type is str and self.paths is None and self.metavar not in _PATHS:
            converted = _decoded(converted)
        if self.paths in {INPUT_PATH, OUTPUT_PATH}:
            _refuse_url(converted, where)
        if self.paths is not None or self.metavar in _PATHS:
            _check_names(converted, where)
        self._check_range(converted, where)
        return converted

    def _check_range(self, value: Any, where: str) -> None:
        if self.choices is not None:
            if hint := (self.refused or {}).get(str(value).lower()):
                raise ConfigError(f"{where}: not supported", hint=hint)
            if value not in self.choices and not (self.form and ":" in value):
                hint = suggestion(value, self.choices)
                alias = nearest(value, self.aliases or ())
                if alias is not None and nearest(value, self.choices) is None:
                    hint = f"{did_you_mean([alias])} {suggestion('', self.choices)}"
                raise ConfigError(f"{where}: unknown choice", hint=hint)
            return
        if self.type not in (int, float):
            return
        out_of_range = (
            not abs(value) < math.inf  # also refuses NaN
            or (self.minimum is not None and value < self.minimum)
            or (self.above is not None and value <= self.above)
            or (self.maximum is not None and value > self.maximum)
            or (self.below is not None and value >= self.below)
        )
        if out_of_range:
            finite = "" if abs(value) < math.inf else ", and finite"
            raise ConfigError(f"{where}: out of range", why=f"{self.expected}{finite}")
        bounds = (self.minimum, self.above) if value < 0 else (self.maximum, self.below)
        if self.type is int and abs(value) > _LARGEST and bounds == (None, None):
            end = f"{self.expected} and <= {_LARGEST}" if self.bound else f"at most {_LARGEST}"
            raise ConfigError(f"{where}: out of range", why=end)


def _refuse_url(path: str, where: str) -> None:
    """Refuse a URL, which names neither a file nor a directory of this machine.

    Raises:
        ConfigError: The path is a URL.
    """
    if _URL.match(path):
        hint = "give the path of a local or mounted directory"
        raise ConfigError(f"{where}: a URL is not a path", hint=hint)


def refuse_unexpanded(path: str, where: str) -> None:
    """Refuse a path that only a shell would understand.

    Args:
        path: The path.
        where: Option with its value, for the message.

    Raises:
        ConfigError: The path begins with `~` or a variable.
    """
    if path.startswith(("~/", "$")) or path == "~":
        raise ConfigError(
            f"{where}: {'`~` is' if path[0] == '~' else 'variables are'} not expanded here",
            why="only a shell does that, at the start of a word",
            hint=f"write the full path, or `./{path}` for a directory of this name",
        )


def _check_names(path: str, where: str) -> None:
    """Refuse a path that no file can have, or whose directory is not accessible.

    Raises:
        ConfigError: A name or the path is too long, has a NUL character, an unexpanded `~` or too
            many directories, symbolic links lead in a circle, or a directory on the way may not be
            searched.
    """
    refuse_unexpanded(path, where)
    if len(path) > _LONGEST_SHOWN:
        where = where.replace(path, f"{path[:_LONGEST_SHOWN]}...")
    if path.count("/") > _MOST_DIRECTORIES:
        deep = f"it has more than {_MOST_DIRECTORIES} directories within each other"
        raise ConfigError(f"{where}: this path cannot be used", why=deep)
    try:
        os.stat(path)  # noqa: PTH116 - also of a text that is no path
    except ValueError:
        raise ConfigError(f"{where}: a path has no NUL character") from None
    except OSError as error:
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES}:
            why = error.strerror
            raise ConfigError(f"{where}: this path cannot be used", why=why) from None


def _decoded(text: str) -> str:
    """Return a text of the command line, whose bytes of UTF-8 the C locale does not decode."""
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:  # other bytes, which only a path may have
        return text


def _digits(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def flag_of(name: str) -> str:
    """Return the long flag of an option: `--train-iters` of `train_iters`."""
    return "--" + name.replace("_", "-")


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0"}:
        return False
    raise ValueError(value)


def _to_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, str):
        return int(value.replace("_", ""))
    if int(value) != value:
        raise ValueError(value)
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _to_str(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        raise ValueError(value)
    return str(value)


_CONVERTERS: Mapping[type, Any] = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


def _read_type(annotation: Any) -> tuple[type, bool, bool]:
    optional = repeated = False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        members = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        (annotation,) = members
    if typing.get_origin(annotation) is tuple:
        repeated = True
        annotation = typing.get_args(annotation)[0]
    if annotation not in _CONVERTERS:
        raise TypeError(f"an option cannot have the type {annotation!r}")
    return annotation, repeated, optional


def is_option(field: dataclasses.Field[Any]) -> bool:
    """Return True if a dataclass field was made with `option`."""
    return _KEY in field.metadata


def options_of(section: type, *, name: str = "", plugin: str = "") -> tuple[Option, ...]:
    """Return the options of a section: its own in order, then its base classes'.

    Args:
        section: A dataclass whose fields were made with `option`.
        name: Name of the section in files and docs.
        plugin: Name of the plugin that declares it; its options are named NAME_FIELD.
    """
    hints = typing.get_type_hints(section)
    found = []
    for field in _fields(section):
        kind, repeated, optional = _read_type(hints[field.name])
        found.append(
            Option(
                name=f"{name}_{field.name}" if plugin else field.name,
                section=name,
                type=kind,
                repeated=repeated,
                optional=optional,
                default=field.default,
                plugin=plugin,
                **field.metadata[_KEY],
            )
        )
    return tuple(found)


def _fields(section: type) -> list[dataclasses.Field[Any]]:
    fields = {field.name: field for field in dataclasses.fields(section)}
    names = [name for base in section.__mro__ for name in vars(base).get("__annotations__", {})]
    return [fields[name] for name in dict.fromkeys(names) if name in fields]
