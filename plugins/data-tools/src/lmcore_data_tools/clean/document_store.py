"""Compressed file of documents with random access, for steps that need all documents."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcore.data.indexed.files import disk_errors
from lmcore_data_tools.clean.document import Entry

__all__ = ["DocumentStore"]

_HEAD = struct.Struct("<IQQI")  # source, number, key, length of the JSON
_LENGTH = struct.Struct("<I")
_LENGTH_AT = _HEAD.size - _LENGTH.size
# Small enough for fast reads of one document, large enough to compress well.
_BLOCK_BYTES = 1 << 16
_BLOCKS_HELD = 64

Keyed = tuple[Entry, int]


class DocumentStore:
    """File of documents, each with a uint64 key.

    Written once from the beginning, then read; close it when done.  Memory: 16 bytes per block of
    about 64 KiB, and a few blocks.

    Args:
        path: path of the file; the owner of its directory removes it.
        block_bytes: size of a block before compression, in bytes.
    """

    def __init__(self, path: Path, *, block_bytes: int = _BLOCK_BYTES) -> None:
        import zstandard

        self.path = path
        self.bytes = 0
        self._block_bytes = block_bytes
        self._packer = zstandard.ZstdCompressor(level=1)
        self._unpacker = zstandard.ZstdDecompressor()
        self._sources: dict[str, int] = {}
        self._names: list[str] = []
        self._firsts, self._offsets = array("q"), array("q", [0])
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._count = 0
        self._held: OrderedDict[int, bytes] = OrderedDict()
        with disk_errors(path):
            self._file = path.open("w+b", buffering=0)

    def __len__(self) -> int:
        return self._count

    def append(self, entries: Sequence[Entry], keys: Sequence[int] | None = None) -> None:
        """Add documents with their keys, 0 by default."""
        for entry, key in zip(entries, keys or [0] * len(entries), strict=True):
            source = self._sources.setdefault(entry.source, len(self._sources))
            if source == len(self._names):
                self._names.append(entry.source)
            if not self._pending:
                self._firsts.append(self._count)
            head = _HEAD.pack(source, entry.number, key, len(entry.raw))
            self._pending += (head, entry.raw)
            self._pending_bytes += len(head) + len(entry.raw)
            self._count += 1
            if self._pending_bytes >= self._block_bytes:
                self.flush()

    def flush(self) -> None:
        """Write pending documents; required before reading."""
        if not self._pending:
            return
        packed = self._packer.compress(b"".join(self._pending))
        with disk_errors(self.path):
            self._file.seek(self._offsets[-1])
            view = memoryview(packed)
            while view:  # an unbuffered file may write a part only
                view = view[self._file.write(view) :]
        self._offsets.append(self._offsets[-1] + len(packed))
        self.bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0

    def blocks(self) -> Iterator[tuple[int, list[Keyed]]]:
        """Yield all documents in order: the position of the first one in a block, and the block."""
        for block in range(len(self._firsts)):
            yield self._firsts[block], self._load(block)

    def read(self, position: int) -> Entry:
        """Return the document at *position*, from 0."""
        block = bisect_right(self._firsts, position) - 1
        if block not in self._held:
            self._held[block] = self._content(block)
            if len(self._held) > _BLOCKS_HELD:
                self._held.popitem(last=False)
        self._held.move_to_end(block)
        content = self._held[block]
        at = 0
        for _ in range(position - self._firsts[block]):
            at += _HEAD.size + _LENGTH.unpack_from(content, at + _LENGTH_AT)[0]
        return _entry(content, at, self._names)[0]

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def _content(self, block: int) -> bytes:
        start, end = self._offsets[block], self._offsets[block + 1]
        with disk_errors(self.path):
            self._file.seek(start)
            content: bytes = self._unpacker.decompress(self._file.read(end - start))
        return content

    def _load(self, block: int) -> list[Keyed]:
        content = self._content(block)
        found: list[Keyed] = []
        at = 0
        while at < len(content):
            keyed = _entry(content, at, self._names)
            found.append(keyed)
            at += _HEAD.size + len(keyed[0].raw)
        return found


def _entry(content: bytes, at: int, names: Sequence[str]) -> Keyed:
    source, number, key, length = _HEAD.unpack_from(content, at)
    start = at + _HEAD.size
    return Entry(names[source], number, content[start : start + length]), key
