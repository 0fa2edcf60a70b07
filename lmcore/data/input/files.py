"""Input files of `--input`, and the format of each.

The format comes from the name without compression suffix (`web.csv.gz` is a table), for `.json`
from the first characters, for Parquet and Arrow from the first bytes, with any name.
"""

from __future__ import annotations

import difflib
import errno
import glob
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from lmcore.base.errors import ConfigError, DataError, counted, suggestion, unreadable
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.corpus import COMPRESSED
from lmcore.data.input.compression import BOM, STDIN, open_text, refuse_device

__all__ = [
    "FORMATS",
    "MAGIC",
    "Format",
    "InputFile",
    "detect_format",
    "ending_of",
    "find_inputs",
    "formats_of",
    "resolve_inputs",
]

_log = logging.getLogger(__name__)

Format = Literal["jsonl", "json", "text", "csv", "tsv", "parquet", "arrow"]
FORMATS: tuple[Format, ...] = get_args(Format)

_ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",  # or "jsonl", by content
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
MAGIC: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"FEA1": "arrow"}
"""First bytes of column formats; an Arrow stream has none."""
_PEEK_BYTES = 1 << 12
_ABOUT_DATA = {"LICENSE", "LICENCE", "COPYING", "NOTICE", "CHANGELOG", "CITATION"}
"""Names, without endings, of files that describe a directory of data, besides README."""
_SHOWN_SKIPPED = 5
_MOST_NAMES = 10_000


@dataclass(frozen=True)
class InputFile:
    """Input file.

    Attributes:
        path: path, or `-` for standard input.
        format: format of its content.
    """

    path: str
    format: Format


def find_inputs(
    inputs: Sequence[str], input_format: str = "auto", *, by_name: bool = False
) -> list[InputFile]:
    """Return the files of `--input`, in its order, each with its format.

    The matches of a pattern and the files of a directory are sorted by path.

    Args:
        inputs: files, patterns, directories, or `-` for standard input.
        input_format: one of `FORMATS` for all of them, or `auto`.
        by_name: take the format of a file from its name alone, and report no choice among files.

    Raises:
        DataError: a missing file, a device, a pattern without a match, or a directory without a
            file of a known format.
        ConfigError: an unknown format.
    """
    if input_format not in {"auto", *FORMATS}:
        raise ConfigError(
            f"unknown `--input-format {input_format}`",
            hint=suggestion(input_format, ("auto", *FORMATS)),
        )
    chosen = None if input_format == "auto" else cast("Format", input_format)
    paths = resolve_inputs(inputs, chosen, report=not by_name)
    if by_name:
        return [InputFile(path, chosen or _named_format(path) or "jsonl") for path in paths]
    return [InputFile(path, chosen) if chosen else detect_format(path) for path in paths]


def formats_of(files: Sequence[InputFile]) -> Counter[str]:
    """Return the number of files of each format; JSON in any form is one."""
    return Counter("jsonl" if file.format == "json" else file.format for file in files)


def resolve_inputs(
    inputs: Sequence[str], chosen: Format | None = None, *, report: bool = True
) -> list[str]:
    """Return the paths of `find_inputs`, without formats.

    Args:
        inputs: files, patterns, directories, or `-` for standard input.
        chosen: format of the files of directories; None: any.
        report: log which files of a directory are skipped.
    """
    files: list[str] = []
    for given in inputs:
        if given == STDIN or _can_be_read(Path(given)):
            refuse_device(given)
            files.append(given)
        elif Path(given).is_dir():
            files.extend(_files_below(given, chosen, report=report))
        else:
            files.extend(_matches(given, chosen, report=report))
    if not files:
        raise DataError("no input", hint="give files with `--input`")
    return files


def detect_format(path: str) -> InputFile:
    """Return a file with its format, from name or content; JSON lines by default."""
    named = _named_format(path)
    if named == "json":
        return InputFile(path, _kind_of_json(_start(path)))
    if named is not None:
        return InputFile(path, named)
    if path != STDIN and Path(path).is_file():  # bytes of a pipe cannot be put back
        start = _start(path)
        for magic, known in MAGIC.items():
            if start.startswith(magic):
                return InputFile(path, known)
    return InputFile(path, "jsonl")


def _can_be_read(path: Path) -> bool:
    """Return True for a file or a pipe, such as a shell's `<(command)`."""
    return path.exists() and not path.is_dir()


def _matches(pattern: str, chosen: Format | None, *, report: bool) -> list[str]:
    """Return the files that match a pattern, and the files below matching directories."""
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  # absolute ones, too
    for path in matches:
        _refuse_broken_link(path)
    files = [path for path in matches if Path(path).is_file()]
    if not files:
        for path in matches:
            files.extend(_files_below(path, chosen, report=report))
    if files:
        return files
    if glob.has_magic(pattern):
        raise _no_match(pattern)
    raise DataError(f"no such file: `{pattern}`", hint=missing_path_hint(pattern))


def _no_match(pattern: str) -> DataError:
    """Return the error for a pattern without a match: where was searched, and what is there."""
    parts = Path(pattern).parts
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    directory = Path(*fixed)
    shown = os.path.abspath(directory)  # noqa: PTH100 - links keep their names
    if pattern.startswith("~") or "{" in pattern or "$" in pattern:
        hint = "leave `~`, `$` and `{a,b}` outside quotes: the shell expands them, lmcore does not"
    else:
        hint = "check the pattern; `*`, `?` and `[...]` are expanded by lmcore, within quotes too"
    if not directory.is_dir():
        return DataError(
            f"no file matches `{pattern}`", why=f"there is no directory `{shown}`", hint=hint
        )
    try:
        names = sorted(path.name for path in itertools.islice(directory.iterdir(), _MOST_NAMES))
    except OSError as error:
        why = f"`{shown}` cannot be read: {unreadable(error)}"
        return DataError(f"no file matches `{pattern}`", why=why, hint=hint)
    close = difflib.get_close_matches(parts[len(fixed)], names, n=3, cutoff=0.5)
    if close:
        why = f"the nearest names in `{shown}`: {', '.join(f'`{name}`' for name in close)}"
    else:
        why = f"no name in `{shown}` is similar" if names else f"`{shown}` is empty"
    return DataError(f"no file matches `{pattern}`", why=why, hint=hint)


def _named_format(path: str) -> Format | None:
    return _ENDINGS.get(ending_of(path))


def ending_of(path: str) -> str:
    """Return the suffix of a name, lower-case, after removal of compression suffixes."""
    name = Path(path).name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return Path(name).suffix


def _files_below(directory: str, chosen: Format | None, *, report: bool) -> list[str]:
    """Return the files below *directory* that have the format, sorted."""
    hidden: list[str] = []
    everything = sorted(_walk(directory, hidden))
    if chosen:
        wanted = {chosen, "json"} if chosen == "jsonl" else {chosen}
        # A name without a suffix may have any format: `part-00001.gz`, `wiki_00`.
        files = [
            path
            for path in everything
            if (_named_format(path) in wanted or not ending_of(path)) and not _is_about_data(path)
        ]
    else:
        files = [path for path in everything if _named_format(path) and not _is_about_data(path)]
    if not files:
        raise _nothing_below(directory, everything, chosen)
    if report:
        _report_choice(directory, files, sorted({*everything, *hidden} - set(files)))
    return files


def _is_about_data(path: str) -> bool:
    """Return True for a README, a license or another file about the data beside it."""
    stem = Path(path).name.partition(".")[0]
    return stem.upper() == "README" or stem in _ABOUT_DATA


def _report_choice(directory: str, files: Sequence[str], skipped: Sequence[str]) -> None:
    """Log which files of a directory are not read, and how many of each format are."""
    named = (_named_format(path) for path in files)
    counts = Counter("jsonl" if name in {"json", None} else name for name in named)
    if len(counts) > 1:
        read = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
        _log.warning("`%s`: reading files of several formats: %s", directory, read)
    if skipped:
        shown = [f"`{os.path.relpath(path, directory)}`" for path in skipped[:_SHOWN_SKIPPED]]
        more = f" and {len(skipped) - len(shown):,} more" if len(skipped) > len(shown) else ""
        _log.warning(
            "`%s`: skipped %s: %s%s",
            directory,
            counted(len(skipped), "file"),
            ", ".join(shown),
            more,
        )


def _walk(directory: str, hidden: list[str]) -> Iterator[str]:
    """Yield the files below *directory*, through links, except hidden ones and markers.

    These, hidden directories, pipes and devices are added to *hidden*.

    Raises:
        DataError: A directory cannot be read, or a link leads nowhere: its documents would be lost.
    """
    seen = set()
    for folder, folders, files in os.walk(directory, followlinks=True, onerror=_refuse):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a parent directory
            folders.clear()
            continue
        seen.add(real)
        hidden += [f"{folder}/{name}/" for name in folders if name.startswith((".", "_"))]
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        for name in files:
            path = os.path.join(folder, name)  # noqa: PTH118  # as fast as the walk
            if name.startswith((".", "_")):
                hidden.append(path)
                continue
            if Path(path).is_file():
                yield path
            else:
                _refuse_broken_link(path)
                hidden.append(path)  # a pipe or a device


def _refuse_broken_link(path: str) -> None:
    if not Path(path).exists():
        _refuse(OSError(errno.ENOENT, "it is a symbolic link to nothing", path))


def _refuse(error: OSError) -> None:
    """Raise the error of a path whose documents would be left out.

    Raises:
        DataError: Always.
    """
    raise DataError(
        f"cannot read `{error.filename}`",
        why=error.strerror,
        hint="its documents would be left out: check the path and its permissions",
    )


def _nothing_below(directory: str, everything: Sequence[str], chosen: Format | None) -> DataError:
    endings = ", ".join(ending for ending, known in _ENDINGS.items() if chosen in {None, known})
    what = f"no {chosen} file in `{directory}`" if chosen else f"no known file in `{directory}`"
    if not everything:
        return DataError(what, why="the directory is empty", hint="check the path")
    return DataError(
        what,
        why=f"it contains {counted(len(everything), 'file')} such as `{everything[0]}`; "
        f"known: {endings}",
        hint="give their format with `--input-format`, or a pattern",
    )


def _start(path: str) -> bytes:
    """Return the first uncompressed bytes of a file; empty for a pipe."""
    if not Path(path).is_file():
        return b""
    with open_text(path) as stream:
        return stream.read(_PEEK_BYTES).removeprefix(BOM)


def _kind_of_json(start: bytes) -> Format:
    """Distinguish JSON lines from an array and from objects over several lines.

    A single object in one line is both, and is read as JSON lines, which is faster.
    """
    text = start.lstrip()
    opened_alone = text[:1] == b"{" and text[1:].lstrip(b" \t\r")[:1] == b"\n"
    return "json" if text[:1] == b"[" or opened_alone else "jsonl"
