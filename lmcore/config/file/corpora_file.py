"""Corpora file: a short YAML file that gives names to files of text.

    c4/en: c4/en/c4-train.*.json.gz
    wiki:
      path: [wiki/a.jsonl, wiki/b.jsonl.xz]
      json_key: body

`--corpora` names it; otherwise `LMCORE_CORPORA`; otherwise it is `corpora.yaml` beside the run's
file of settings, or in the working directory if there is no such file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, LmcoreError, suggestion
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.corpus import (
    DOCUMENT_UNITS,
    Corpus,
    is_corpus_name,
    is_text_path,
    named_path,
)
from lmcore.config.file.yaml_file import check_nodes, scalar
from lmcore.config.settings import Provenance

if TYPE_CHECKING:
    import yaml

__all__ = [
    "CORPORA_FILE",
    "VARIABLE",
    "corpora_layer",
    "corpus_names",
    "found_corpora_file",
    "is_corpora_file",
    "read_corpora",
]

CORPORA_FILE = "corpora.yaml"
"""Name of the corpora file that is found without an option."""

VARIABLE = "LMCORE_CORPORA"
"""Environment variable with the path of a corpora file."""

_MAX_BYTES = 1 << 16
_KEYS = ("path", "json_key", "input_format", "document_per", "append_eod", "on_error", "summary")
_CHOICES = {
    "document_per": DOCUMENT_UNITS,
    "append_eod": ("true", "false"),
    "on_error": ("stop", "skip"),
}
_EXAMPLE = "write `NAME: PATH`, or below `NAME:`, indented, `path: PATH` and other keys"
_QUOTED = "quote a pattern that begins with `*` or `!`: `web: '*.jsonl.gz'`"
_TEXT_OPTIONS = ("corpus", "train_data", "valid_data", "test_data")
"""Options whose values may be names of corpora."""


def is_corpora_file(word: str) -> bool:
    """Return True if a value of `--corpora` is a file rather than "NAME=PATH"."""
    return word.lower().endswith((".yaml", ".yml"))


def corpora_layer(
    layers: Sequence[Mapping[str, tuple[Any, Provenance]]],
    files: Sequence[str],
    environment: Mapping[str, str],
) -> dict[str, tuple[Any, Provenance]]:
    """Return the value of `--corpora` of a run that does not give it; empty if there is no file.

    Args:
        layers: Values of the files of settings and of the command line.
        files: Files of settings that the user gives.
        environment: Environment variables.
    """
    given = [layer[name][0] for layer in layers for name in _TEXT_OPTIONS if name in layer]
    words = [word for value in given for word in ([value] if isinstance(value, str) else value)]
    if not words or any(layer["corpora"][0] for layer in layers if "corpora" in layer):
        return {}
    found = found_corpora_file(files, environment)
    # A set NAME=PREFIX of an indexed dataset needs no file.
    used = any(named_path(word) is None for word in words)
    if found is None or not (used or corpus_names([found[0]], words)):
        return {}
    return {"corpora": ((found[0],), found[1])}


def found_corpora_file(
    files: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, Provenance] | None:
    """Return the path of the corpora file that no option names, and its source; None if none is.

    Args:
        files: Files of settings that the user gives.
        environment: Environment variables.
    """
    named = environment.get(VARIABLE, "").strip()
    if named:
        return named, Provenance("environment", VARIABLE)
    for folder in [Path(file).parent for file in reversed(files)] or [Path()]:
        if (folder / CORPORA_FILE).is_file():
            path = str(folder / CORPORA_FILE)
            return path, Provenance("file", path)
    return None


def read_corpora(values: Sequence[str]) -> tuple[dict[str, Corpus], list[LmcoreError]]:
    """Return the corpora that the values of `--corpora` name, and every problem of them.

    Args:
        values: Corpora files, and "NAME=PATH".
    """
    found: dict[str, Corpus] = {}
    problems: list[LmcoreError] = []
    for value in values:
        given = _read_file(value, problems) if is_corpora_file(value) else _inline(value, problems)
        for corpus in given:
            if corpus.name in found:
                what = f"{corpus.where}: there are two corpora `{corpus.name}`"
                why = f"the other one is of {found[corpus.name].where}"
                problems.append(ConfigError(what, why=why, hint="give one of them another name"))
            else:
                found[corpus.name] = corpus
    return found, problems


def corpus_names(corpora: Sequence[str], valid_data: Sequence[str]) -> frozenset[str]:
    """Return the corpora that the validation sets NAME=CORPUS of a run are.

    A dataset with such a prefix comes first.  What is wrong with the corpora is reported later.

    Args:
        corpora: Values of `--corpora`.
        valid_data: Values of `--valid-data`.
    """
    named = (named_path(word) for word in valid_data)
    wanted = {one[1] for one in named if one is not None and is_corpus_name(one[1])}
    wanted = {name for name in wanted if not Path(f"{name}.idx").exists()}
    return frozenset(wanted & read_corpora(corpora)[0].keys()) if wanted else frozenset()


def _inline(value: str, problems: list[LmcoreError]) -> list[Corpus]:
    name, equals, path = (part.strip() for part in value.partition("="))
    where = f"`--corpora {value}`"
    if not (equals and path):
        hint = "write `--corpora NAME=PATH`, or name a corpora file that ends with `.yaml`"
        problems.append(ConfigError(f"{where} is not NAME=PATH", hint=hint))
        return []
    return [Corpus(name, (path,), where=where)] if _is_name(name, where, problems) else []


def _is_name(name: str, where: str, problems: list[LmcoreError]) -> bool:
    if is_corpus_name(name):
        return True
    why = "it reads as a path" if is_text_path(name) else None
    hint = "a name has letters, digits and `_`, `-`, `.`, with `/` between its parts"
    problems.append(ConfigError(f"{where}: `{name}` is not a name", why=why, hint=hint))
    return False


def _read_file(path: str, problems: list[LmcoreError]) -> list[Corpus]:
    import yaml

    what = f"cannot read the corpora file `{path}`"
    try:
        text = read_bounded_file(path, _MAX_BYTES).decode("utf-8-sig")
        check_nodes(text, yaml.SafeLoader)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        hint = missing_path_hint(path)
        problems.append(ConfigError(what, why=error.strerror or str(error), hint=hint))
        return []
    except UnicodeDecodeError:
        problems.append(ConfigError(what, why="it is not UTF-8 text"))
        return []
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else path
        why = str(getattr(error, "problem", None) or "its lists are nested too deeply")
        hint = _QUOTED if "alias" in str(error) or "tag" in str(error) else _EXAMPLE
        problems.append(ConfigError(f"{where}: not YAML", why=why, hint=hint))
        return []
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        problems.append(ConfigError(f"`{path}` does not give names to paths", hint=_EXAMPLE))
        return []
    found = (_corpus(path, key, value, problems) for key, value in root.value)
    return [corpus for corpus in found if corpus is not None]


def _corpus(
    path: str, key: yaml.Node, node: yaml.Node, problems: list[LmcoreError]
) -> Corpus | None:
    """Return the corpus of one entry of a file; None if anything is wrong with it."""
    from yaml import MappingNode

    where = f"{path}:{key.start_mark.line + 1}"
    name, known = str(key.value), len(problems)
    if not isinstance(key.value, str) or not _is_name(name, where, problems):
        return None
    values: dict[str, tuple[str, ...]] = {}
    is_mapping = isinstance(node, MappingNode)
    if not is_mapping:
        values["path"] = _texts(node)
    for inner, value in node.value if is_mapping else ():
        place, field = f"{path}:{inner.start_mark.line + 1}", str(inner.value).replace("-", "_")
        if field not in _KEYS:
            hint = suggestion(field, _KEYS)
            problems.append(ConfigError(f"{place}: unknown key `{inner.value}`", hint=hint))
            continue
        words = _texts(value)
        allowed = _CHOICES.get(field)
        if not all(words) or not words or (field != "path" and len(words) > 1):
            problems.append(ConfigError(f"{place}: `{field}` takes a value", hint=_EXAMPLE))
        elif allowed and words[0] not in allowed:
            what = f"{place}: `{field}: {words[0]}`: unknown choice"
            problems.append(ConfigError(what, hint=suggestion(words[0], allowed)))
        values[field] = words
    if len(problems) == known and not all(values.get("path") or ("",)):
        problems.append(ConfigError(f"{where}: corpus `{name}` has no path", hint=_EXAMPLE))
    if len(problems) > known:
        return None
    one = {field: words[0] for field, words in values.items()}
    eod = one.get("append_eod")
    folder = Path(path).parent
    return Corpus(
        name,
        tuple(os.path.normpath(folder / word) for word in values["path"]),
        json_key=one.get("json_key", "text"),
        input_format=one.get("input_format", "auto"),
        document_per=one.get("document_per", DOCUMENT_UNITS[0]),
        append_eod=None if eod is None else eod == "true",
        skip=one.get("on_error") == "skip",
        summary=one.get("summary", ""),
        where=where,
    )


def _texts(node: yaml.Node) -> tuple[str, ...]:
    """Return the value or the values of a node; an empty text for each that is none."""
    from yaml import ScalarNode, SequenceNode

    nodes = node.value if isinstance(node, SequenceNode) else [node]
    return tuple((isinstance(one, ScalarNode) and scalar(one)) or "" for one in nodes)
