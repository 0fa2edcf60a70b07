"""Reads JSON lines from files, globs and standard input, compressed or not, in bounded batches.

Compression is told by a file's first bytes, not by its name: published corpora have `.json` files
that are gzip inside, and gzip files of many members.
"""

from __future__ import annotations

import glob
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from lmcore.data.zstd_stream import open_zstd
from lmcore.errors import DataError

__all__ = ["STDIN", "LineBatch", "open_text", "read_batches", "resolve_inputs"]

STDIN = "-"
_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"


class _Lines(Protocol):
    def __iter__(self) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file, as they stand there.

    Attributes:
        source: The file, for messages.
        first_line: Number of the first line, from 1.
        lines: The lines with their endings.
    """

    source: str
    first_line: int
    lines: tuple[bytes, ...]

    @property
    def where(self) -> str:
        """The lines' place, for messages."""
        return f"`{self.source}` lines {self.first_line}-{self.first_line + len(self.lines) - 1}"


def resolve_inputs(inputs: Sequence[str]) -> list[str]:
    """Return the files that `--input` names, in its order; a pattern's matches are sorted.

    Raises:
        DataError: A file that is missing, a directory, or a pattern without a match.
    """
    files: list[str] = []
    for given in inputs:
        if given == STDIN or _can_be_read(Path(given)):
            files.append(given)
            continue
        matches = sorted(
            path
            for path in glob.glob(given, recursive=True)  # noqa: PTH207  # absolute ones, too
            if Path(path).is_file()
        )
        if not matches:
            raise _no_input(given)
        files.extend(matches)
    if not files:
        raise DataError("no input", hint="name the files to prepare with `--input`")
    return files


def _can_be_read(path: Path) -> bool:
    """Return whether *path* is a file, or a pipe such as a shell's `<(command)`."""
    return path.exists() and not path.is_dir()


def _no_input(given: str) -> DataError:
    if Path(given).is_dir():
        return DataError(
            f"`{given}` is a directory", hint=f"name its files, for example `{given}/*.jsonl`"
        )
    if glob.has_magic(given):
        return DataError(f"no file matches `{given}`")
    return DataError(f"no such file: `{given}`", hint="check `--input`")


@contextmanager
def open_text(source: str) -> Iterator[BinaryIO]:
    """Open a file, or standard input for `-`, uncompressed; damage becomes a `DataError`."""
    try:
        with (
            _raw(source) as raw,
            _uncompressed(raw) as stream,
        ):
            yield stream
    except EOFError:
        raise DataError(
            f"`{source}` is cut short", why="its compressed data ends in the middle", hint=_AGAIN
        ) from None
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"`{source}` is damaged", why=str(error), hint=_AGAIN) from None
    except OSError as error:
        raise DataError(f"cannot read `{source}`", why=error.strerror or str(error)) from error


_AGAIN = "copy or download it again"


@contextmanager
def _raw(source: str) -> Iterator[io.BufferedReader]:
    if source == STDIN:
        yield cast("io.BufferedReader", sys.stdin.buffer)
    else:
        with Path(source).open("rb") as file:
            yield file


@contextmanager
def _uncompressed(raw: io.BufferedReader) -> Iterator[BinaryIO]:
    start = raw.peek(len(_XZ))
    if start.startswith(_GZIP):
        with gzip.GzipFile(fileobj=raw) as members:
            yield cast("BinaryIO", members)
    elif start.startswith(_XZ):
        with lzma.LZMAFile(raw) as stream:
            yield cast("BinaryIO", stream)
    elif start.startswith(_ZSTD):
        with open_zstd(raw) as frames:
            yield frames
    else:
        yield raw


def read_batches(
    files: Sequence[str], *, max_lines: int = 512, max_bytes: int = 1 << 20
) -> Generator[LineBatch, None, None]:
    """Yield the lines of all files in order, never lines of two files together.

    Args:
        files: As `resolve_inputs` returns them.
        max_lines: A batch has at most so many lines,
        max_bytes: and ends with the line that reaches so many bytes.

    Raises:
        DataError: A file that cannot be read to its end.
    """
    for source in files:
        with open_text(source) as stream:
            yield from _batches(source, stream, max_lines=max_lines, max_bytes=max_bytes)


def _batches(
    source: str, stream: _Lines, *, max_lines: int, max_bytes: int
) -> Generator[LineBatch, None, None]:
    lines: list[bytes] = []
    size = 0
    first = number = 1
    for line in stream:
        lines.append(line.removeprefix(_BOM) if number == 1 else line)
        size += len(line)
        number += 1
        if len(lines) >= max_lines or size >= max_bytes:
            yield LineBatch(source, first, tuple(lines))
            lines, size, first = [], 0, number
    if lines:
        yield LineBatch(source, first, tuple(lines))
