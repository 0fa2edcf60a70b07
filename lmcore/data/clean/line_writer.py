"""Writes lines to a file that is complete or not there, compressed as its name says."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

from lmcore.data.indexed.files import disk_errors
from lmcore.durable import AtomicFile
from lmcore.errors import ConfigError

__all__ = ["STDOUT", "LineWriter"]

STDOUT = "-"
_BUFFER_BYTES = 1 << 20
_OTHER_FORMATS = {".csv", ".tsv", ".parquet", ".arrow", ".txt", ".zip", ".bin", ".idx"}


class LineWriter:
    """Writes to a temporary name beside *path*; `finish`, then `commit` gives it its own.

    Close it in any case: what was not committed goes, and an older file stays as it was.  The same
    lines give the same bytes.

    Args:
        path: Ends in `.gz`, `.zst`, `.xz` or `.bz2`, or is not compressed; `-` is standard output.

    Raises:
        DataError: The disk is full, or the directory not writable.
        ConfigError: A name that promises another format.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes = 0
        self._target = Path(path)
        if self._target.suffix.lower() in _OTHER_FORMATS:
            raise ConfigError(
                f"`{path}`: what is written is JSON lines",
                hint=f"call it `{self._target.with_suffix('.jsonl')}`, or with `.gz`, `.zst` or "
                "`.xz` behind to have it compressed",
            )
        if self._target.is_dir():
            raise ConfigError(f"`{path}` is a directory", hint=f"name a file: `{path}/clean.jsonl`")
        self._file: AtomicFile | None = None
        if path == STDOUT:
            self._stream: Any = sys.stdout.buffer
            return
        with disk_errors(self._target):
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._file = AtomicFile(self._target, buffering=_BUFFER_BYTES)
        self._stream = _compressed(self._file.stream, self._target.suffix.lower())

    def write(self, lines: Iterable[bytes]) -> None:
        """Write *lines*, which have no ends."""
        content = b"".join(part for line in lines for part in (line, b"\n"))
        self.bytes += len(content)
        if self._file is None:
            self._stream.write(content)  # a closed pipe ends the command, quietly
            return
        with disk_errors(self._target):
            self._stream.write(content)

    def finish(self) -> None:
        """Bring everything to the disk."""
        if self._file is None:
            self._stream.flush()
            return
        with disk_errors(self._target):
            if self._stream is not self._file.stream:
                self._stream.close()
            self._file.finish()

    def commit(self) -> None:
        """Give the finished file its name."""
        if self._file is not None:
            with disk_errors(self._target):
                self._file.commit()

    def close(self) -> None:
        """Remove what is not committed; may be called again."""
        if self._file is None:
            return
        with contextlib.suppress(OSError, ValueError):  # a full disk is full again
            self._stream.close()
        self._file.close()


def _compressed(file: BinaryIO, ending: str) -> Any:
    if ending in {".gz", ".gzip"}:
        # Neither name nor time: the same lines are the same bytes.
        return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
    if ending in {".zst", ".zstd"}:
        import zstandard

        return zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False)
    if ending == ".xz":
        return lzma.LZMAFile(cast("Any", file), "wb")
    if ending == ".bz2":
        return bz2.BZ2File(cast("Any", file), "wb")
    return file
