"""Checksums of a dataset's `.idx` and `.bin`, which `PREFIX.meta.json` records.

Megatron's formats have none, so that bits that change on a disk could be trained on.  The `.idx` is
small and is verified as a whole at each open.  The `.bin` has a checksum for each block: an open
verifies the first, the last and two random ones, which takes milliseconds; `--verify-data` and
`lmcore data inspect --scan` verify all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmcore.base.crc32 import crc32
from lmcore.base.errors import counted
from lmcore.base.threads import map_in_threads
from lmcore.data.indexed.files import disk_errors

__all__ = ["DatasetChecksums"]

_BLOCK = 1 << 20
_MOST_BLOCKS = 1 << 21  # 16 MiB of hexadecimal digits
_SAMPLED = 4
_PIECE = 1 << 20
_DIGITS = 8
_MOST_THREADS = 8
_SHOWN = 3


@dataclass(frozen=True)
class DatasetChecksums:
    """Sizes and CRC-32 of the two files; checksums are hexadecimal, with 8 digits.

    Attributes:
        idx_bytes: Size of the `.idx`.
        idx_crc32: Checksum of the `.idx`.
        bin_bytes: Size of the `.bin`.
        block_bytes: Size of a block of the `.bin`; the last one may be shorter.
        bin_crc32: Checksums of the blocks, one after another.
        crc32: Checksum of the other fields.
    """

    idx_bytes: int
    idx_crc32: str
    bin_bytes: int
    block_bytes: int
    bin_crc32: str
    crc32: str

    @classmethod
    def of_files(cls, bin_path: Path, idx_path: Path) -> DatasetChecksums:
        """Compute the checksums of two finished files, which are still in the page cache.

        Raises:
            DataError: A file cannot be read.
        """
        with disk_errors(idx_path):
            idx_bytes = idx_path.stat().st_size
            idx_crc32 = _checksum(idx_path, 0, idx_bytes)
        with disk_errors(bin_path):
            bin_bytes, size = bin_path.stat().st_size, _BLOCK
            while size * _MOST_BLOCKS < bin_bytes:
                size *= 2
            blocks = _block_checksums(bin_path, range(-(-bin_bytes // size)), size)
        values = (idx_bytes, idx_crc32, bin_bytes, size, "".join(blocks))
        return cls(*values, _own_checksum(values))

    def with_index(self, idx_path: Path) -> DatasetChecksums:
        """Return the checksums of the same `.bin` with another `.idx`.

        Raises:
            DataError: The file cannot be read.
        """
        with disk_errors(idx_path):
            size = idx_path.stat().st_size
            crc = _checksum(idx_path, 0, size)
        values = (size, crc, self.bin_bytes, self.block_bytes, self.bin_crc32)
        return DatasetChecksums(*values, _own_checksum(values))

    @classmethod
    def of_json(cls, values: object) -> DatasetChecksums:
        """Return checksums that were read from a file.

        Raises:
            ValueError: They are not what `to_json` returned.
        """
        if not isinstance(values, Mapping) or any(
            type(values.get(name)) is not kind for name, kind in _KINDS.items()
        ):
            raise ValueError("`checksums` is incomplete, or has values of other types")
        found = cls(**{name: values[name] for name in _KINDS})
        own = tuple(getattr(found, name) for name in _KINDS if name != "crc32")
        if _own_checksum(own) != found.crc32:
            raise ValueError("`checksums` does not match its own checksum: this file is damaged")
        return found

    @property
    def blocks(self) -> int:
        """Number of blocks of the `.bin`."""
        return len(self.bin_crc32) // _DIGITS

    def to_json(self) -> dict[str, Any]:
        """Return the checksums as JSON values."""
        return asdict(self)

    def idx_problem(self, idx_path: Path) -> str | None:
        """Return the damage of the `.idx`; None if it matches."""
        try:
            if (found := idx_path.stat().st_size) != self.idx_bytes:
                return f"`{idx_path}` has {counted(found, 'byte')}, expected {self.idx_bytes:,}"
            if _checksum(idx_path, 0, found) != self.idx_crc32:
                return f"the content of `{idx_path}` does not match its checksum"
        except OSError as error:
            return f"`{idx_path}` cannot be read: {error.strerror}"
        return None

    def sample(self) -> list[int]:
        """Return the numbers of a few blocks: the first, the last and two random ones."""
        if self.blocks <= _SAMPLED:
            return list(range(self.blocks))
        inner = random.SystemRandom().sample(range(1, self.blocks - 1), _SAMPLED - 2)
        return [0, *sorted(inner), self.blocks - 1]

    def bin_problem(self, bin_path: Path, blocks: Iterable[int]) -> str | None:
        """Return the damage of the `.bin` in some blocks; None if they match.

        Args:
            bin_path: Path of the file.
            blocks: Numbers of the blocks to read, in order.
        """
        numbers = list(blocks)
        try:
            if (size := bin_path.stat().st_size) != self.bin_bytes:
                return f"`{bin_path}` has {counted(size, 'byte')}, expected {self.bin_bytes:,}"
            found = _block_checksums(bin_path, numbers, self.block_bytes)
        except OSError as error:
            return f"`{bin_path}` cannot be read: {error.strerror}"
        wrong = [
            number
            for number, crc in zip(numbers, found, strict=True)
            if crc != self.bin_crc32[number * _DIGITS : (number + 1) * _DIGITS]
        ]
        if not wrong:
            return None
        size = self.block_bytes
        shown = ", ".join(
            f"{number * size} to {min((number + 1) * size, self.bin_bytes) - 1}"
            for number in wrong[:_SHOWN]
        )
        more = f" and {len(wrong) - _SHOWN} more blocks" if len(wrong) > _SHOWN else ""
        return f"the content of `{bin_path}` does not match its checksums: bytes {shown}{more}"


_KINDS = {
    "idx_bytes": int,
    "idx_crc32": str,
    "bin_bytes": int,
    "block_bytes": int,
    "bin_crc32": str,
    "crc32": str,
}


def _own_checksum(values: tuple[object, ...]) -> str:
    return _hexadecimal(crc32(" ".join(map(str, values)).encode()))


def _hexadecimal(crc: int) -> str:
    return f"{crc:0{_DIGITS}x}"


def _block_checksums(path: Path, blocks: Iterable[int], size: int) -> list[str]:
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    return map_in_threads(lambda number: _checksum(path, number * size, size), blocks, threads)


def _checksum(path: Path, start: int, count: int) -> str:
    """Return the checksum of *count* bytes from *start* on, fewer at the end of the file."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while count > 0 and (piece := file.read(min(count, _PIECE))):
            crc = crc32(piece, crc)
            count -= len(piece)
    return _hexadecimal(crc)
