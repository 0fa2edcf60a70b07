"""What the readers of the input yield: consecutive documents of one file, and what is wrong.

Both kinds know where they come from, so that a message can name the line, and carry the problems
that were found while reading, so that the first one of the input is reported whoever finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmcore.data.input.problem import Problem, Unit

__all__ = ["Batch", "LineBatch", "TextBatch"]


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of JSON, as they stand in the file: nothing is copied line by line.

    Attributes:
        source: The file, for messages.
        first_line: Number of the first line, from 1.
        block: The lines with their endings, one after another; no byte-order mark.
        position: Bytes of the file on the disk (compressed ones, where it is) read so far.
        problems: What could not be read; their lines are not in the block.
    """

    source: str
    first_line: int
    block: bytes
    position: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the input, uncompressed."""
        return len(self.block)

    @property
    def num_lines(self) -> int:
        """Number of lines in the block."""
        return self.block.count(b"\n") + (not self.block.endswith(b"\n") and bool(self.block))

    @property
    def lines(self) -> tuple[bytes, ...]:
        """The lines with their endings, copied out of the block."""
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
        """The lines' place, for messages."""
        last = max(self.first_line, self.first_line + self.num_lines - 1)
        return f"`{self.source}` lines {self.first_line}-{last}"


@dataclass(frozen=True)
class TextBatch:
    """Documents whose texts are already known, of any format but JSON lines.

    Attributes:
        source: The file, for messages.
        unit: What `numbers` count: a line, a row, an object, a document.
        numbers: Place of each document in the file, from 1.
        columns: The texts of each key, in the order of the keys; each as long as `numbers`.
        size: Bytes of the input that the batch stands for, uncompressed.
        position: Bytes of the file on the disk read so far.
        problems: What could not be read; these documents are not in the columns.
    """

    source: str
    unit: Unit
    numbers: tuple[int, ...]
    columns: tuple[tuple[str, ...], ...]
    size: int
    position: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def where(self) -> str:
        """The documents' place, for messages."""
        first, last = (self.numbers[0], self.numbers[-1]) if self.numbers else (0, 0)
        return f"`{self.source}` {self.unit}s {first}-{last}"


Batch = LineBatch | TextBatch
