"""Data file lists: `weight path corpus` a line, which say how much of each dataset a run sees.

`lmcore data weights` writes them, training reads them.  Lists of two columns, `weight path`, are
read as well; the corpus then follows from the path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from lmcore.config.data_source import without_ending
from lmcore.errors import ConfigError, DataError, LmcoreError, counted

__all__ = [
    "DataFile",
    "corpus_of",
    "format_data_file_list",
    "parse_data_file_list",
    "read_data_file_list",
    "scan_data_file_list",
]

_MAX_BYTES = 1 << 26
_MOST_SHOWN = 20


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


def read_data_file_list(path: str | Path) -> tuple[DataFile, ...]:
    """Return the lines of a data file list.

    Raises:
        DataError: It cannot be read.
        ConfigError: It is empty, or has lines that are none (names all of them).
    """
    return _sound(scan_data_file_list(path))


def scan_data_file_list(path: str | Path) -> tuple[tuple[DataFile, ...], list[LmcoreError]]:
    """Return the lines of a data file list as far as they can be read, and what is wrong with them.

    A line of which only the weight is wrong is among them, so that more can be found wrong with it.

    Raises:
        DataError: It cannot be read.
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
    return _scan(text, str(path))


def parse_data_file_list(text: str, *, source: str) -> tuple[DataFile, ...]:
    """Return the lines of a data file list; blank lines and `#` comments are passed over.

    Args:
        text: The content.
        source: Where it stands, for messages.

    Raises:
        ConfigError: No line, or some that are none (names all of them).
    """
    return _sound(_scan(text, source))


def _sound(scanned: tuple[tuple[DataFile, ...], list[LmcoreError]]) -> tuple[DataFile, ...]:
    files, problems = scanned
    if problems:
        raise ConfigError.collect(problems)
    return files


def _scan(text: str, source: str) -> tuple[tuple[DataFile, ...], list[LmcoreError]]:
    files: list[DataFile] = []
    problems: list[LmcoreError] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            file = _parse_line(line.split(), f"`{source}` line {number}", problems)
            files += [file] if file is not None else []
    if not files and not problems:
        problems.append(ConfigError(f"`{source}` names no data", hint=_SHAPE))
    if (more := len(problems) - _MOST_SHOWN) > 0:
        what = f"`{source}`: {more:,} more {'line is' if more == 1 else 'lines are'} none"
        problems[_MOST_SHOWN:] = [ConfigError(what, hint=_SHAPE)]
    return tuple(files), problems


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


def _parse_line(words: list[str], where: str, problems: list[LmcoreError]) -> DataFile | None:
    if len(words) not in (2, 3):
        problems.append(ConfigError(f"{where} has {counted(len(words), 'column')}", hint=_SHAPE))
        return None
    weight = _number(words[0])
    if weight is None:
        swapped = _number(words[1]) is not None
        problem = ConfigError(
            f"{where}: `{words[0]}` is not a weight",
            hint="the weight comes before the path" if swapped else _SHAPE,
        )
        problems.append(problem)
        return None
    if not 0 < weight < math.inf:
        problem = ConfigError(
            f"{where}: the weight `{words[0]}` is not above 0",
            hint="remove the line to leave the data out",
        )
        problems.append(problem)
    path = without_ending(words[1])
    return DataFile(weight, path, words[2] if len(words) == 3 else corpus_of(path))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
