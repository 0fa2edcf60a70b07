"""Opening of files, pipes and standard input with decompression, detected by content, not by name.

Published corpora have `.json` files that are gzip inside, gzip files with many members, truncated
archives.  One loop reads all archives: member after member to the end of the file, with an error if
the last one is truncated (some packages silently stop there), and never more than a small piece at
a time, so that an archive of zeros does not fill the memory.  Devices, which may have no end, are
refused, and so are UTF-16 and UTF-32, which no reader takes.
"""

from __future__ import annotations

import bz2
import io
import logging
import lzma
import os
import select
import shlex
import stat
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from lmcore.base.errors import DataError, MissingPackageError
from lmcore.base.missing_path import missing_path_hint

__all__ = [
    "BOM",
    "STDIN",
    "CutShortError",
    "DamagedError",
    "Opened",
    "blocks",
    "open_input",
    "open_text",
    "refuse_device",
]

_log = logging.getLogger(__name__)

STDIN = "-"
_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 18
_ZSTD_STEPS = 1 << 8, 1 << 12  # its decompressor has no output limit: 4 bytes may give 128 KiB
_ZSTD_SUSPECT = 64  # expansion above which the input steps get small
_XZ_MEMORY_BYTES = 1 << 28  # `xz -9` needs 64 MiB
_AGAIN = "copy or download it again"
BOM = b"\xef\xbb\xbf"
_WIDE_MARKS = {  # UTF-32 first: its little-endian mark begins with that of UTF-16
    b"\xff\xfe\0\0": "UTF-32LE",
    b"\0\0\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}
_WIDE_SAMPLE = 1 << 9
_WIDE_LEAST = 16
_MOSTLY = 0.7
_POINTER = b"version https://git-lfs"
_SILENT_SECONDS = 1.0
"""Seconds without data from a pipe after which a line says that lmcore waits for it."""


class _BadArchiveError(Exception):
    """Error of a decompressor."""


_DAMAGE = (zlib.error, lzma.LZMAError, _BadArchiveError)


class DamagedError(DataError):
    """Error for a file whose data is invalid or truncated at some point."""


class CutShortError(DamagedError):
    """Error for a truncated file."""


@dataclass(frozen=True)
class Opened:
    """Open input.

    Attributes:
        stream: uncompressed bytes.
        position: returns the number of bytes of the file on disk read so far; 0 for a pipe.
    """

    stream: BinaryIO
    position: Callable[[], int]


class _Member(Protocol):
    """Decompressor of one member, frame or stream of an archive."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def more(self, data: bytes) -> bytes:
        """Return the next output; *data* is empty while `pending`."""

    @property
    def pending(self) -> bool: ...


@contextmanager
def open_text(source: str) -> Iterator[BinaryIO]:
    """Open a file, or standard input for `-`, with decompression.

    Raises:
        DamagedError: damaged data, while reading.
        DataError: it cannot be opened or read, or is a device, UTF-16, UTF-32 or a pointer of Git
            LFS.
        MissingPackageError: the package for its compression is not installed.
    """
    with open_input(source) as opened:
        yield opened.stream


@contextmanager
def open_input(source: str) -> Iterator[Opened]:
    """Open a file as `open_text` does, with the position in it."""
    try:
        with _raw(source) as raw:
            stream = _uncompressed(raw)
            start = cast("io.BufferedReader", stream).peek(_WIDE_SAMPLE)
            _refuse_pointer(start, source)
            _refuse_wide(start, source)
            yield Opened(stream, _position(raw))
    except EOFError:
        why = "its compressed data is incomplete"
        raise CutShortError(f"`{source}` is cut short", why=why, hint=_AGAIN) from None
    except _DAMAGE as error:
        raise DamagedError(f"`{source}` is damaged", why=str(error), hint=_AGAIN) from None
    except OSError as error:
        why, hint = error.strerror or str(error), missing_path_hint(source, None)
        if isinstance(error, IsADirectoryError):
            hint = f"give a file in it, as `{Path(source) / 'FILE'}`"
        raise DataError(f"cannot read `{source}`", why=why, hint=hint) from error


def blocks(opened: Opened, size: int) -> Generator[bytes, None, None]:
    """Yield the input in blocks of *size* bytes, the last one shorter, without a byte-order mark.

    Data before a damage is yielded, as a shorter block, before the error is raised.
    """
    read = cast("io.BufferedReader", opened.stream).read1
    first, ended = True, False
    damage: Exception | None = None
    while not ended:
        pieces: list[bytes] = []
        missing = max(size, len(BOM))
        try:
            while missing and (piece := read(missing)):
                pieces.append(piece)
                missing -= len(piece)
            ended = bool(missing)
        except (EOFError, *_DAMAGE) as error:
            damage, ended = error, True
        block = b"".join(pieces)
        if first:
            block, first = block.removeprefix(BOM), False
        if block:
            yield block
    if damage is not None:
        raise damage


@contextmanager
def _raw(source: str) -> Iterator[io.BufferedReader]:
    if source == STDIN:
        if sys.stdin.isatty():
            _log.warning("reading standard input from the terminal: Ctrl-D ends it")
        yield cast("io.BufferedReader", sys.stdin.buffer)
        return
    refuse_device(source)
    # Without O_NONBLOCK, opening a named pipe waits for a writer without a word.
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            _await_data(descriptor, source)
        os.set_blocking(descriptor, True)
        yield file


def refuse_device(source: str) -> None:
    """Raise `DataError` for a device or a socket; a pipe and a terminal can be read."""
    try:
        mode = Path(source).stat().st_mode
    except OSError:
        return  # opening it says why
    if stat.S_ISCHR(mode) and _is_terminal(source):
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        kind = "socket" if stat.S_ISSOCK(mode) else "device"
        raise DataError(
            f"`{source}` is a {kind}",
            why="only files and pipes are read; a device may have no end",
            hint="give a file, a named pipe, `<(command)`, or `-` for standard input",
        )


def _is_terminal(source: str) -> bool:
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)


def _await_data(descriptor: int, source: str) -> None:
    """Wait until a pipe has data or its last writer has closed it; say so after a second."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    if not waiting.poll(_SILENT_SECONDS * 1000):
        _log.warning("waiting for data from the pipe `%s`: no program has written to it", source)
        waiting.poll()


def _refuse_pointer(start: bytes, source: str) -> None:
    """Raise `DataError` for the file that Git LFS has in place of one that is not fetched."""
    if start.startswith(_POINTER):
        raise DataError(
            f"`{source}` is a pointer of Git LFS",
            why="a clone has such a file in place of each file that it has not downloaded",
            hint="`git lfs pull` in the clone downloads the files, with `--include` some of them",
        )


def _refuse_wide(start: bytes, source: str) -> None:
    """Raise `DataError` for text of 16 or 32 bits per character."""
    encoding = _wide_encoding(start[:_WIDE_SAMPLE])
    if encoding is None:
        return
    family = encoding.removesuffix("LE").removesuffix("BE")
    marked = start.startswith(tuple(_WIDE_MARKS))
    name = "FILE" if source == STDIN else shlex.quote(source)
    raise DataError(
        f"`{source}` is {family}, not UTF-8",
        why="it begins with the byte-order mark of this encoding"
        if marked
        else "most of its characters have a zero byte",
        hint=f"convert it: `iconv -f {family if marked else encoding} -t UTF-8 {name} > "
        "CONVERTED_FILE`",
    )


def _wide_encoding(start: bytes) -> str | None:
    """Return the encoding that a byte-order mark names, or the pattern of zero bytes shows."""
    for mark, encoding in _WIDE_MARKS.items():
        if start.startswith(mark):
            return encoding
    units = len(start) // 4
    if len(start) < _WIDE_LEAST or b"\0" not in start:
        return None
    zeros = [start[at : 4 * units : 4].count(0) / units for at in range(4)]
    often = [share > _MOSTLY for share in zeros]
    never = [share == 0 for share in zeros]
    patterns = {
        "UTF-32LE": never[0] and often[1] and zeros[2] == zeros[3] == 1,
        "UTF-32BE": never[3] and often[2] and zeros[0] == zeros[1] == 1,
        "UTF-16LE": never[0] and never[2] and often[1] and often[3],
        "UTF-16BE": never[1] and never[3] and often[0] and often[2],
    }
    return next((name for name, found in patterns.items() if found), None)


def _position(raw: io.BufferedReader) -> Callable[[], int]:
    seekable = raw.seekable()
    return lambda: raw.tell() if seekable else 0


class _Gzip:
    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    @property
    def pending(self) -> bool:
        return bool(self._zlib.unconsumed_tail)

    def more(self, data: bytes) -> bytes:
        return self._zlib.decompress(data or self._zlib.unconsumed_tail, _PIECE_BYTES)


class _Bounded:
    """Decompressor of `lzma` or `bz2`, which have the same interface."""

    def __init__(self, decompressor: lzma.LZMADecompressor | bz2.BZ2Decompressor) -> None:
        self._decompressor = decompressor

    @property
    def eof(self) -> bool:
        return self._decompressor.eof

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data

    @property
    def pending(self) -> bool:
        return not self._decompressor.needs_input and not self._decompressor.eof

    def more(self, data: bytes) -> bytes:
        try:
            return self._decompressor.decompress(data, _PIECE_BYTES)
        except OSError as error:  # what bz2 raises
            raise _BadArchiveError(str(error).lower()) from None


class _Zstd:
    """Decompressor of zstd, fed in steps that are small while the data expands a lot."""

    def __init__(self) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._input, self._at, self._step = b"", 0, _ZSTD_STEPS[0]

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data + self._input[self._at :]

    @property
    def pending(self) -> bool:
        return self._at < len(self._input) and not self._frame.eof

    def more(self, data: bytes) -> bytes:
        if data:
            self._input, self._at = data, 0
        piece = self._input[self._at : self._at + self._step]
        self._at += len(piece)
        try:
            out = self._frame.decompress(piece)
        except self._error as error:
            raise _BadArchiveError(str(error)) from None
        grown = len(out) > _ZSTD_SUSPECT * len(piece)
        self._step = _ZSTD_STEPS[0] if grown else min(2 * self._step, _ZSTD_STEPS[1])
        return out


def _xz() -> _Bounded:
    return _Bounded(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES))


def _bz2() -> _Bounded:
    return _Bounded(bz2.BZ2Decompressor())


_KINDS: dict[bytes, Callable[[], _Member]] = {
    b"\x1f\x8b": _Gzip,
    b"\xfd7zXZ\x00": _xz,
    b"BZh": _bz2,
    b"\x28\xb5\x2f\xfd": _Zstd,
}


def _uncompressed(raw: io.BufferedReader) -> BinaryIO:
    start = raw.peek(max(map(len, _KINDS)))
    for magic, kind in _KINDS.items():
        if start.startswith(magic):
            if kind is _Zstd:
                _require_zstandard()
            members = _Members(raw, kind)
            return cast("BinaryIO", io.BufferedReader(members, _PIECE_BYTES))
    return raw


def _require_zstandard() -> None:
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "zstandard", needed_for="a `.zst` file", install="pip install zstandard"
        ) from None


class _Members(io.RawIOBase):
    """Stream of the concatenated contents of all members of an archive."""

    def __init__(self, raw: io.BufferedReader, kind: Callable[[], _Member]) -> None:
        self._raw, self._kind = raw, kind
        self._member: _Member | None = None
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the stub is wider
        while not self._pending and self._advance():
            pass
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _advance(self) -> bool:
        """Read and decompress the next piece; return False at the end of the file."""
        member, chunk = self._member, b""
        if member is None or member.eof:
            chunk = self._after_padding(b"" if member is None else member.unused_data)
            if not chunk:
                return False
            self._member = member = self._kind()
        elif not member.pending:
            chunk = self._raw.read(_READ_BYTES)
            if not chunk:
                raise EOFError
        self._pending = memoryview(member.more(chunk))
        return True

    def _after_padding(self, chunk: bytes) -> bytes:
        """Return the data after zero padding (of tapes and `xz`); empty at the end of the file."""
        while not (chunk := chunk.lstrip(b"\0")):
            chunk = self._raw.read(_READ_BYTES)
            if not chunk:
                break
        return chunk
