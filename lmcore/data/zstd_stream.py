"""Reads zstd streams to their end: all frames, and an error where the last one is cut short.

The reader of the `zstandard` package takes the end of the file for the end of the data, so that
a truncated corpus would pass for a short one.
"""

from __future__ import annotations

import io
from types import ModuleType
from typing import BinaryIO, cast

from lmcore.errors import MissingPackageError

__all__ = ["open_zstd"]

# Small: one read may grow several thousand times when it is decompressed.
_READ_BYTES = 1 << 14
_BUFFER_BYTES = 1 << 20


def open_zstd(raw: io.BufferedReader) -> BinaryIO:
    """Return the decompressed stream of *raw*.

    Raises:
        MissingPackageError: `zstandard` is not installed.
        EOFError: On reading, data that ends inside a frame.
        OSError: On reading, data that is no zstd.
    """
    try:
        import zstandard
    except ImportError:
        raise MissingPackageError(
            "zstandard", needed_for="a `.zst` file", install="pip install zstandard"
        ) from None
    return cast("BinaryIO", io.BufferedReader(_Frames(raw, zstandard), _BUFFER_BYTES))


class _Frames(io.RawIOBase):
    def __init__(self, raw: io.BufferedReader, zstandard: ModuleType) -> None:
        self._raw = raw
        self._zstandard = zstandard
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False
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
        """Decompress some more; return False at the end of the data."""
        chunk = self._frame.unused_data or self._raw.read(_READ_BYTES)
        if not chunk:
            if self._inside:
                raise EOFError
            return False
        if self._frame.eof:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._pending = memoryview(self._frame.decompress(chunk))
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        self._inside = not self._frame.eof
        return True
