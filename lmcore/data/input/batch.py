"""Batches of consecutive documents of one file, as the readers of the input yield them.

A batch has its position in the file, for messages, and the problems found while reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmcore.data.input.problem import InputProblem, Unit

__all__ = ["Batch", "LineBatch", "TextBatch"]


@dataclass(frozen=True)
class LineBatch:
    """Consecutive JSON lines as one block of bytes: no copy per line.

    Attributes:
        source: path of the file, for messages.
        first_line: number of the first line, from 1.
        block: the lines with their line ends, without a byte-order mark.
        position: number of bytes of the file on disk (possibly compressed) read so far.
        problems: unreadable lines, which are not in the block.
    """

    source: str
    first_line: int
    block: bytes
    position: int = 0
    problems: tuple[InputProblem, ...] = ()

    @property
    def size(self) -> int:
        """Size of the input, in bytes, uncompressed."""
        return len(self.block)

    @property
    def num_lines(self) -> int:
        """Number of lines in the block."""
        return self.block.count(b"\n") + (not self.block.endswith(b"\n") and bool(self.block))

    @property
    def lines(self) -> tuple[bytes, ...]:
        """Lines with their line ends, copied out of the block."""
        return tuple(self._cut())

    def _cut(self) -> Iterator[bytes]:
        start, end = 0, self.block.find(b"\n") + 1
        while end:
            yield self.block[start:end]
            start, end = end, self.block.find(b"\n", end) + 1
        if start < len(self.block):
            yield self.block[start:]

    @property
    def where(self) -> str:
        """Position of the lines, for messages."""
        last = max(self.first_line, self.first_line + self.num_lines - 1)
        return f"`{self.source}` lines {self.first_line}-{last}"


@dataclass(frozen=True)
class TextBatch:
    """Documents of any format except JSON lines, as texts.

    Attributes:
        source: path of the file, for messages.
        unit: unit of `numbers`: line, row, object or document.
        numbers: number of each document in the file, from 1.
        columns: texts of each key, in the order of the keys; each as long as `numbers`.
        size: size of the input, in bytes, uncompressed.
        position: number of bytes of the file on disk read so far.
        problems: unreadable documents, which are not in the columns.
    """

    source: str
    unit: Unit
    numbers: tuple[int, ...]
    columns: tuple[tuple[str, ...], ...]
    size: int
    position: int = 0
    problems: tuple[InputProblem, ...] = ()

    @property
    def where(self) -> str:
        """Position of the documents, for messages."""
        first, last = (self.numbers[0], self.numbers[-1]) if self.numbers else (0, 0)
        return f"`{self.source}` {self.unit}s {first}-{last}"


Batch = LineBatch | TextBatch
