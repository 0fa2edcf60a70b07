"""Tasks written as YAML files, whose examples are made by templates.  Torch-free.

The file may be anybody's: its size is bounded, YAML makes texts, lists and mappings alone, and
templates run in jinja2's sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, DataError, suggestion
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.file.yaml_file import check_nodes
from lmcore.evaluation.files import Row, json_rows
from lmcore.evaluation.score import check_kind, check_metrics
from lmcore.evaluation.task import Choices, Continued, Example, Task, Text

__all__ = ["yaml_task"]

_MAX_BYTES = 1 << 16
_LONGEST = 1 << 24
"""Most characters of the text of a template."""
_HEAD = ("name", "summary", "files", "release", "kind", "metrics")
_KINDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "end": ("context", "end"),
    "choices": ("context", "choices", "choice", "gold"),
}
"""Keys of each kind of example."""
_EXAMPLES: Mapping[str, type[Example]] = {"text": Text, "end": Continued, "choices": Choices}
_OPTIONAL = frozenset({"release", "metrics", "choice"})
_METRICS: Mapping[str, tuple[str, ...]] = {
    "text": ("loss", "token_perplexity", "word_perplexity", "bits_per_byte"),
    "end": ("acc", "perplexity"),
    "choices": ("acc", "acc_norm"),
}


def yaml_task(path: Path) -> Task:
    """Return the task of a YAML file.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read, a key is unknown or missing, or a value is wrong.
    """
    given = _mapping(path)
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"`{path}` has no `kind`" if kind is None else f"`kind: {kind!s:.60}` of `{path}`",
            why="it is the kind of the examples: a text, a text with its end, or choices",
            hint=suggestion(str(kind), _KINDS) if kind else "write `kind: choices`",
        )
    known = (*_HEAD, *_KINDS[kind])
    for key in given:
        if key not in known:
            raise ConfigError(
                f"`{path}` has the key `{key!s:.60}`",
                why=f"a task of the kind `{kind}` has no such key",
                hint=suggestion(str(key), known),
            )
    missing = [key for key in known if key not in given and key not in _OPTIONAL]
    if missing:
        raise ConfigError(f"`{path}` has no `{missing[0]}`", hint=f"write `{missing[0]}: ...`")
    make = _maker(_Keys(given, path), kind)

    def examples(data: Path) -> Iterator[Example]:
        for row in json_rows(data):
            yield make(row)

    keys = _Keys(given, path)
    task = Task(
        keys.text("name"),
        keys.text("summary"),
        keys.texts("files"),
        examples,
        keys.texts("metrics") if "metrics" in given else _METRICS[kind],
        keys.text("release") if "release" in given else f"the author of `{path}`",
    )
    check_metrics(task)
    check_kind(task, _EXAMPLES[kind])
    return task


def _mapping(path: Path) -> dict[Any, Any]:
    try:
        # Makes texts, lists and mappings alone: `choices: [yes, no]` are two texts.
        content = read_bounded_file(path, _MAX_BYTES)
        check_nodes(content, yaml.SafeLoader)
        given = yaml.load(content, Loader=yaml.BaseLoader)  # noqa: S506
    except OSError as error:
        raise ConfigError(
            f"cannot read the task `{path}`",
            why=error.strerror or str(error),
            hint=missing_path_hint(path),
        ) from None
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(
            f"`{path}` is not a task of lmcore",
            why=str(error.problem),
            hint="write templates and texts; tasks of lm-eval-harness are for `--harness`",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"`{path}` is not YAML", why=why) from None
    if not isinstance(given, dict):
        raise ConfigError(
            f"`{path}` defines no task",
            why="its top level is no mapping",
            hint="write `name: ...` and further keys",
        )
    return given


@dataclass(frozen=True)
class _Keys:
    """Values of a file, with its path for messages."""

    given: Mapping[Any, Any]
    path: Path

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        value = self.given[key]
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(key, "a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, or a text as a list of one."""
        value = self.given[key]
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not found:
            raise self._wrong(key, "a text, or a list of texts")
        if not all(isinstance(one, str) for one in found):
            raise self._wrong(key, "a text, or a list of texts")
        return tuple(found)

    def template(self, key: str, default: str = "") -> _Filled:
        """Return a template."""
        value = self.given.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a template, which is a text")
        return _Filled(_compiled(value, key, self.path), key)

    def _wrong(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"`{key}` of `{self.path}` is not {wanted}", why=f"it is `{self.given[key]!s:.60}`"
        )


@dataclass(frozen=True)
class _Filled:
    """Template of a key."""

    template: Template
    key: str

    def __call__(self, row: Row, **more: object) -> str:
        """Return the text for a row.

        Raises:
            DataError: The row lacks a field, or an expression fails.
        """
        pieces, left = [], _LONGEST
        try:
            for piece in self.template.generate({**row.values, **more}):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    break
        except Exception as error:
            fields = ", ".join(f"`{name!s:.60}`" for name in list(row.values)[:10]) or "none"
            raise DataError(
                f"the template `{self.key}` fails for {row.where}",
                why=f"{type(error).__name__}: {error}",
                hint=f"the fields are {fields}",
            ) from error
        if left < 0:
            raise DataError(
                f"`{self.key}` of {row.where} is too long",
                why=f"it has more than {_LONGEST:,} characters",
            )
        return "".join(pieces)


def _compiled(source: str, key: str, path: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"`{key}` of `{path}` is no template", why=f"line {error.lineno}: {error.message}"
        ) from None
    except TemplateError as error:
        raise ConfigError(f"`{key}` of `{path}` is no template", why=str(error)) from None


def _maker(keys: _Keys, kind: str) -> Callable[[Row], Example]:
    """Return a function that makes the example of a row."""
    if kind == "text":
        text = keys.template("text")
        return lambda row: Text(made := text(row), made)
    context = keys.template("context")
    if kind == "end":
        end = keys.template("end")
        return lambda row: Continued(context(row), end(row))
    choices, gold = _choices(keys), _gold(keys)

    def choice_example(row: Row) -> Choices:
        plain, answers = choices(row)
        return Choices((context(row),), answers, gold(row, plain))

    return choice_example


def _choices(keys: _Keys) -> Callable[[Row], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return a function of a row: the answers, and what the model reads of each."""
    shown = keys.template("choice", " {{ choice }}")
    if isinstance(keys.given["choices"], str):
        field = keys.given["choices"]

        def plain(row: Row) -> tuple[str, ...]:
            *outer, last = field.split(".")
            for name in outer:
                row = row.row(name)
            return row.texts(last)

    else:
        templates = [
            _Filled(_compiled(one, "choices", keys.path), "choices")
            for one in keys.texts("choices")
        ]

        def plain(row: Row) -> tuple[str, ...]:
            return tuple(one(row) for one in templates)

    def both(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
        found = plain(row)
        return found, tuple(shown(row, choice=one) for one in found)

    return both


def _gold(keys: _Keys) -> Callable[[Row, tuple[str, ...]], int]:
    """Return a function of a row and its answers: the number of the right one."""
    value = keys.given["gold"]
    source = value if isinstance(value, str) else str(value)
    filled = _Filled(
        _compiled(source if "{" in source else f"{{{{ {source} }}}}", "gold", keys.path), "gold"
    )

    def number(row: Row, plain: tuple[str, ...]) -> int:
        found = filled(row).strip()
        if found in plain:
            return plain.index(found)
        if not found.lstrip("-").isdecimal():
            raise row.wrong("gold", found, "the number of a choice, or one of them")
        return row.chosen(int(found), plain)

    return number
