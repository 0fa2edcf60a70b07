"""Data file lists: the datasets of a run and their weights, `weight path corpus` on each line.

`lmcore data weights` writes them, training reads them.  Lists of two columns, `weight path`, are
read as well; the corpus then follows from the path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, DataError, LmcoreError, counted
from lmcore.config.derived.data_source import LARGEST_WEIGHT, without_ending

__all__ = [
    "DataFile",
    "corpus_of",
    "format_data_file_list",
    "parse_data_file_list",
    "read_data_file_list",
    "read_small_text",
]

_MAX_BYTES = 1 << 26
_MOST_SHOWN = 20
_SHAPE = "a line is `weight path corpus`, or `weight path`"


@dataclass(frozen=True)
class DataFile:
    """Line of a data file list.

    Attributes:
        weight: Share of the samples, above 0, not normalized.
        path: Prefix of the dataset, without `.bin` or `.idx`.
        corpus: Name of the collection that contains the dataset.
    """

    weight: float
    path: str
    corpus: str


def corpus_of(path: str) -> str:
    """Return the corpus that a path belongs to: its file name up to the first `-`."""
    return PurePath(path).name.partition("-")[0]


def read_data_file_list(path: str | Path) -> tuple[tuple[DataFile, ...], list[LmcoreError]]:
    """Return the lines of a data file list, and its problems (see `parse_data_file_list`).

    Raises:
        DataError: The file cannot be read.
    """
    return parse_data_file_list(read_small_text(path), source=str(path))


def parse_data_file_list(
    text: str, *, source: str
) -> tuple[tuple[DataFile, ...], list[LmcoreError]]:
    """Return the lines of a data file list, and its problems.

    Blank lines and `#` comments are skipped.  A line with only a wrong weight is returned, too, so
    that its path can be checked.

    Args:
        text: Content of the list.
        source: Path of the list, for messages.
    """
    files: list[DataFile] = []
    problems: list[LmcoreError] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            file = _parse_line(line.split(), f"`{source}` line {number}", problems)
            files += [file] if file is not None else []
    if not files and not problems:
        problems.append(ConfigError(f"`{source}` names no data", hint=_SHAPE))
    if (more := len(problems) - _MOST_SHOWN) > 0:
        what = f"`{source}`: {more:,} more {'line is' if more == 1 else 'lines are'} invalid"
        problems[_MOST_SHOWN:] = [ConfigError(what, hint=_SHAPE)]
    return tuple(files), problems


def format_data_file_list(files: Iterable[DataFile]) -> str:
    """Return the list as text of three columns; weights keep all their digits.

    Raises:
        DataError: A path or corpus contains white space, which the format cannot represent.
    """
    lines = []
    for file in files:
        for word in (file.path, file.corpus):
            if word.split() != [word]:
                raise DataError(
                    f"a data file list cannot contain `{word}`",
                    why="its columns are separated by white space",
                    hint="rename it, or link to it under a name without spaces",
                )
        lines.append(f"{file.weight!r} {file.path} {file.corpus}\n")
    return "".join(lines)


def read_small_text(path: str | Path) -> str:
    """Return the content of a UTF-8 text file of at most 64 MiB, without a byte-order mark.

    Raises:
        DataError: The file cannot be read, is larger, or is not UTF-8.
    """
    try:
        return read_bounded_file(path, _MAX_BYTES).decode().removeprefix("\ufeff")
    except OSError as error:
        raise DataError(f"cannot read `{path}`", why=error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise DataError(f"`{path}` is not UTF-8 text") from None


def _parse_line(words: list[str], line: str, problems: list[LmcoreError]) -> DataFile | None:
    if len(words) not in (2, 3):
        problems.append(ConfigError(f"{line} has {counted(len(words), 'column')}", hint=_SHAPE))
        return None
    weight = _number(words[0])
    if weight is None:
        swapped = _number(words[1]) is not None
        hint = "the weight comes before the path" if swapped else _SHAPE
        problems.append(ConfigError(f"{line}: `{words[0]}` is not a weight", hint=hint))
        return None
    if not 0 < weight < math.inf:
        hint = "remove the line to leave the data out"
        problems.append(ConfigError(f"{line}: the weight `{words[0]}` is not above 0", hint=hint))
    elif weight > LARGEST_WEIGHT:
        hint = f"the sum of weights may overflow: give a number below {LARGEST_WEIGHT:g}"
        problems.append(ConfigError(f"{line}: the weight `{words[0]}` is too large", hint=hint))
    path = without_ending(words[1])
    return DataFile(weight, path, words[2] if len(words) == 3 else corpus_of(path))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
