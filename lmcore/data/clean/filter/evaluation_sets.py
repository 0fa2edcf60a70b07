"""Evaluation sets for decontamination of the corpus (step `ngram`)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from lmcore.data.input.compression import open_text
from lmcore.data.input.files import ending_of, resolve_inputs
from lmcore.errors import DataError

__all__ = ["read_evaluation_sets"]

_MOST_BYTES = 1 << 30
_TABLES = {".csv": ",", ".tsv": "\t"}


def read_evaluation_sets(files: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the texts under any of *keys*, at any depth of the records of evaluation sets.

    The published formats of LAMBADA, RACE, SQuAD and the tables of GLUE are supported.

    Args:
        files: JSON lines, JSON, csv or tsv, compressed or not; patterns and directories as well.
        keys: keys of texts or of lists of texts.

    Raises:
        DataError: a file that cannot be read, or that has none of the keys.
    """
    texts: list[str] = []
    wanted = frozenset(keys)
    for path in resolve_inputs(files):
        before = len(texts)
        names: dict[str, None] = {}
        for record in _records(path):
            names.update(dict.fromkeys(_names(record)))
            texts.extend(_texts(record, wanted, inside=False))
        if len(texts) == before:
            shown = ", ".join(f"`{name[:40]}`" for name in list(names)[:20]) or "none"
            raise DataError(
                f"`{path}` has no text under {' or '.join(f'`{key}`' for key in keys)}",
                why=f"its keys: {shown}",
                hint="give the keys of the texts with `--task-keys`",
            )
    return texts


def _records(path: str) -> Iterator[Any]:
    text = _content(path)
    delimiter = _TABLES.get(ending_of(path))
    if delimiter is not None:
        csv.field_size_limit(_MOST_BYTES)
        if delimiter == "\t":  # quotes are ordinary characters in the tables of GLUE
            rows = csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            rows = csv.DictReader(io.StringIO(text), delimiter=delimiter)
        yield from rows
        return
    try:
        yield json.loads(text)  # one object or array, over any number of lines
    except (ValueError, RecursionError):
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"`{path}` line {number}: broken JSON",
                        why=str(error),
                        hint="an evaluation set is JSON lines, JSON, or a table `.csv` or `.tsv`",
                    ) from None


def _content(path: str) -> str:
    with open_text(path) as stream:
        content = stream.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise DataError(f"`{path}` has more than 1 GiB", why="evaluation sets are read into memory")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"`{path}` is not UTF-8", hint="convert the file to UTF-8") from None


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name)
            yield from _names(inner)
    elif isinstance(value, list):
        for inner in value[:1]:
            yield from _names(inner)


def _texts(value: Any, keys: frozenset[str], *, inside: bool) -> Iterator[str]:
    """Yield the strings below the keys; *inside* is set below one of them."""
    if isinstance(value, str):
        if inside:
            yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, keys, inside=inside or name in keys)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, keys, inside=inside)
