"""Data file lists: `weight path corpus` a line, which say how much of each dataset a run sees.

`lmcore data weights` writes them, training reads them.  Lists of two columns, `weight path`, are
read as well; the corpus then follows from the path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from lmcore.errors import DataError

__all__ = [
    "DataFile",
    "corpus_of",
    "format_data_file_list",
    "parse_data_file_list",
    "read_data_file_list",
    "without_ending",
]

_MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class DataFile:
    """One line of a data file list.

    Attributes:
        weight: Share of the samples, above 0; readers divide by the sum.
        path: Prefix of the dataset, without `.bin` or `.idx`.
        corpus: Name of the collection that the dataset is a part of.
    """

    weight: float
    path: str
    corpus: str


def corpus_of(path: str) -> str:
    """Return the corpus that a path belongs to: its file name up to the first `-`."""
    return PurePath(path).name.partition("-")[0]


def without_ending(path: str) -> str:
    """Return the prefix that `PREFIX.bin`, `PREFIX.idx` or the prefix itself names."""
    return path.removesuffix(".bin").removesuffix(".idx")


def read_data_file_list(path: str | Path) -> tuple[DataFile, ...]:
    """Return the lines of a data file list.

    Raises:
        DataError: It cannot be read, is empty, or has a line that is none (names the line).
    """
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"cannot read the data file list `{path}`", why=error.strerror or str(error)
        ) from None
    if len(content) > _MAX_BYTES:
        raise DataError(
            f"`{path}` is no data file list", why=f"it is larger than {_MAX_BYTES >> 20} MiB"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise DataError(f"`{path}` is no data file list", why="it is not UTF-8 text") from None
    return parse_data_file_list(text, source=str(path))


def parse_data_file_list(text: str, *, source: str) -> tuple[DataFile, ...]:
    """Return the lines of a data file list; blank lines and `#` comments are passed over.

    Args:
        text: The content.
        source: Where it stands, for messages.

    Raises:
        DataError: No line, or one that is none (names it).
    """
    files = [
        _parse_line(line.split(), f"`{source}` line {number}")
        for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not files:
        raise DataError(f"`{source}` names no data", hint=_SHAPE)
    return tuple(files)


def format_data_file_list(files: Iterable[DataFile]) -> str:
    """Return the list as text of three columns; weights keep all their digits.

    Raises:
        DataError: A path or corpus that has white space in it, which the format cannot hold.
    """
    lines = []
    for file in files:
        for word in (file.path, file.corpus):
            if word.split() != [word]:
                raise DataError(
                    f"`{word}` cannot stand in a data file list",
                    why="its columns are separated by white space",
                    hint="rename it, or link to it under a name without spaces",
                )
        lines.append(f"{file.weight!r} {file.path} {file.corpus}\n")
    return "".join(lines)


_SHAPE = "a line is `weight path corpus`, or `weight path`"


def _parse_line(words: list[str], where: str) -> DataFile:
    if len(words) not in (2, 3):
        raise DataError(f"{where} has {len(words)} columns", hint=_SHAPE)
    weight = _number(words[0])
    if weight is None:
        swapped = _number(words[1]) is not None
        raise DataError(
            f"{where}: `{words[0]}` is not a weight",
            hint="the weight comes before the path" if swapped else _SHAPE,
        )
    if not 0 < weight < math.inf:
        raise DataError(
            f"{where}: the weight `{words[0]}` is not above 0",
            hint="remove the line to leave the data out",
        )
    path = without_ending(words[1])
    return DataFile(weight, path, words[2] if len(words) == 3 else corpus_of(path))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
