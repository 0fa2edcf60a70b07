"""Checksums: equal to zlib's, with each implementation."""

from __future__ import annotations

import random
import zlib

from lmcore.base.crc32 import crc32


def test_equals_zlibs() -> None:
    """Any length and alignment, whole or in pieces."""
    content = memoryview(random.Random(0).randbytes(70_000))
    for start, size in ((0, 0), (0, 1), (3, 15), (1, 16), (5, 4097), (7, 60_001)):
        piece = content[start : start + size]
        assert crc32(piece) == zlib.crc32(piece)
        assert crc32(content[:9], crc32(piece)) == zlib.crc32(content[:9], zlib.crc32(piece))
