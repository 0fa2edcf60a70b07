"""Paths in settings: relative to the file that holds them, and absolute in a run's own file.

Paths of a run whose directory was moved, alone or together with its data, are searched again.

The declaration of an option says by `paths` that its value holds paths, and in which form.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmcore.config.corpus import is_corpus_name, is_text_path, named_path
from lmcore.config.derived.data_source import is_number
from lmcore.config.file.corpora_file import is_corpora_file
from lmcore.config.option import (
    CORPORA,
    INPUT_PATH,
    NAMED,
    OUTPUT_PATH,
    RANGES,
    SCRIPTS,
    SETS,
    Option,
)
from lmcore.config.settings import Provenance
from lmcore.config.tokenizer import COPIED_FILES

__all__ = ["absolute_paths", "follow_moved_paths", "map_paths", "path_exists"]


def map_paths(option: Option, value: Any, function: Callable[[str], str]) -> Any:
    """Return the value of an option with *function* applied to each path in it.

    Weights beside the prefixes of a list stay as they are, as does text of a wrong form.
    """
    if option.paths is None or value is None:
        return value
    if option.paths in {INPUT_PATH, OUTPUT_PATH}:
        return function(value)
    each = _EACH.get(option.paths)
    if each is not None:
        return tuple(each(word, function) for word in value)
    if option.paths != RANGES:
        return tuple(word if is_number(word) else function(word.strip()) for word in value)
    groups = value if any(" " in word.strip() for word in value) else [" ".join(value)]
    return tuple(_map_ranges(group, function) for group in groups if group)


def _map_named(word: str, function: Callable[[str], str]) -> str:
    """Return a path, or "NAME=PATH", with *function* applied to the path."""
    name, equals, path = word.strip().partition("=")
    # A path may have the character, too.
    return f"{name}={function(path)}" if equals and "/" not in name else function(word.strip())


def _map_scripts(word: str, function: Callable[[str], str]) -> str:
    """Return names, with commas between, with *function* applied to each path of a Python file."""
    names = (one.strip() for one in word.split(","))
    return ",".join(function(one) if one.endswith(".py") else one for one in names)


def _map_set(word: str, function: Callable[[str], str]) -> str:
    """Return a path, or "NAME=PREFIX", with *function* applied to the path; names as they are."""
    named = named_path(word)
    if named is not None and "/" not in named[0]:
        path = function(named[1])
        # A corpus and a prefix read alike.
        is_name = is_corpus_name(named[1]) and not Path(f"{path}.idx").exists()
        return f"{named[0]}={named[1] if is_name else path}"
    if named is not None:
        return word
    return function(word) if is_text_path(word) else word


def _map_corpus(word: str, function: Callable[[str], str]) -> str:
    """Return a corpora file, or "NAME=PATH", with *function* applied to the path."""
    name, equals, path = word.partition("=")
    if is_corpora_file(word) or not equals:
        return function(word)
    return f"{name.strip()}={function(path.strip())}"


_EACH: Mapping[str, Callable[[str, Callable[[str], str]], str]] = {
    NAMED: _map_named,
    SCRIPTS: _map_scripts,
    SETS: _map_set,
    CORPORA: _map_corpus,
}


def _map_ranges(group: str, function: Callable[[str], str]) -> str:
    """Return "NAME: WEIGHT START:END PATH, ..." with *function* applied to each path."""
    title, _, rest = group.partition(":")
    entries = [entry.split() for entry in rest.split(",") if entry.strip()]
    if any(len(entry) != 3 for entry in entries):
        return group
    mapped = (f"{weight} {span} {function(path)}" for weight, span, path in entries)
    return f"{title}: {', '.join(mapped)}"


def absolute_paths(option: Option, value: Any) -> Any:
    """Return the value of an option with every path made absolute."""
    return map_paths(option, value, os.path.abspath)


def path_exists(path: str) -> bool:
    """Return True if there is a file or directory *path*, or a dataset with this prefix.

    A pattern exists if a file matches it.
    """
    if any(Path(path + ending).exists() for ending in ("", ".idx", ".bin")):
        return True
    return glob.has_magic(path) and next(glob.iglob(path, recursive=True), None) is not None  # noqa: PTH207


def follow_moved_paths(
    layer: dict[str, tuple[Any, Provenance]],
    options: Mapping[str, Option],
    before: str | None,
    now: Path,
) -> list[str]:
    """Replace paths of files that are gone by their new places; return a notice for each.

    A path that was next to the run directory, or below it, is searched at the same place relative
    to the directory's new path.  A tokenizer's file is also in the run's own copy.  A path to write
    to that was below the run directory follows it also if it does not exist yet.

    Args:
        layer: Settings of the run by option name, changed in place.
        options: Options by name.
        before: Absolute path of the run directory when the settings were written; None if unknown.
        now: Path of the run directory.
    """
    notices: list[str] = []
    here = os.path.abspath(now)  # noqa: PTH100 - links keep their names

    def places(name: str, path: str) -> list[str]:
        found = []
        if before is not None and before != here and os.path.isabs(path):  # noqa: PTH117
            found.append(os.path.normpath(os.path.join(here, os.path.relpath(path, before))))  # noqa: PTH118
        copies = COPIED_FILES.get(name, ())
        suffix = Path(path).suffix
        copy = next((file for file in copies if file.endswith(suffix)), None)
        return found if copy is None else [*found, str(now / "tokenizer" / copy)]

    for name, (value, origin) in layer.items():
        option = options[name]
        if option.paths is None:
            continue

        def follow(path: str, option: Option = option) -> str:
            if path_exists(path):
                return path
            found = places(option.name, path)
            place = next((one for one in found if path_exists(one)), path)
            if option.paths == OUTPUT_PATH and place == path and found:
                place = found[0] if Path(found[0]).is_relative_to(here) else path
            if place != path:
                notices.append(f"`{option.name}`: `{path}` is gone; `{place}` is used")
            return place

        layer[name] = map_paths(option, value, follow), origin
    return notices
