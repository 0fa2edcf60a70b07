"""Atomic writing of lines to a file, compressed by its suffix."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

from lmcore.base.durable import AtomicFile
from lmcore.base.errors import ConfigError
from lmcore.data.indexed.files import disk_errors

__all__ = ["STDOUT", "LineWriter"]

STDOUT = "-"
_BUFFER_BYTES = 1 << 20
_OTHER_FORMATS = {".csv", ".tsv", ".parquet", ".arrow", ".txt", ".zip", ".bin", ".idx"}


class LineWriter:
    """Writer of lines to a temporary file beside *path*; call `finish`, then `commit` to rename it.

    Close it in any case: an uncommitted file is removed, and an older one stays.  The same lines
    give the same bytes.

    Args:
        path: path with suffix `.gz`, `.zst`, `.xz`, `.bz2`, or uncompressed; `-` is standard
            output.

    Raises:
        DataError: the disk is full, or the directory not writable.
        ConfigError: a suffix of another format.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes = 0
        self._target = Path(path)
        if self._target.suffix.lower() in _OTHER_FORMATS:
            raise ConfigError(
                f"`{path}`: the output is JSON lines",
                hint=f"name it `{self._target.with_suffix('.jsonl')}`, with another `.gz`, `.zst` "
                "or `.xz` for compression",
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
        """Write *lines*, given without line ends."""
        content = b"".join(part for line in lines for part in (line, b"\n"))
        self.bytes += len(content)
        if self._file is None:
            self._stream.write(content)  # a closed pipe ends the command without a message
            return
        with disk_errors(self._target):
            self._stream.write(content)

    def finish(self) -> None:
        """Sync the file to disk."""
        if self._file is None:
            self._stream.flush()
            return
        with disk_errors(self._target):
            if self._stream is not self._file.stream:
                self._stream.close()
            self._file.finish()

    def commit(self) -> None:
        """Rename the finished file to its final name."""
        if self._file is not None:
            with disk_errors(self._target):
                self._file.commit()

    def close(self) -> None:
        """Remove an uncommitted file; may be called again."""
        if self._file is None:
            return
        with contextlib.suppress(OSError, ValueError):  # closing flushes, which may fail again
            self._stream.close()
        self._file.close()


def _compressed(file: BinaryIO, ending: str) -> Any:
    if ending in {".gz", ".gzip"}:
        # Without name and time: the same lines give the same bytes.
        return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
    if ending in {".zst", ".zstd"}:
        import zstandard

        return zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False)
    if ending == ".xz":
        return lzma.LZMAFile(cast("Any", file), "wb")
    if ending == ".bz2":
        return bz2.BZ2File(cast("Any", file), "wb")
    return file
