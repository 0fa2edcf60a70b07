"""JSON lines: blocks of whole lines, cut by one search for the last line end in each.

Nothing is done line by line here; the lines are parsed where they are encoded.
"""

from __future__ import annotations

from collections.abc import Generator

from lmcore.data.input.batch import LineBatch
from lmcore.data.input.compression import blocks, open_input
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import too_long

__all__ = ["read"]


def read(file: InputFile, options: InputOptions) -> Generator[LineBatch, None, None]:
    """Yield the lines of *file*; one longer than the bound is a problem and passed over.

    Raises:
        DamagedError: It cannot be read to its end; all whole lines before came.
        DataError: It cannot be read at all.
    """
    bound = options.max_document_bytes
    begun = _Begun(bound)
    number = 1
    with open_input(file.path) as opened:
        for block in blocks(opened, min(options.batch_bytes, bound)):
            first, end = block.find(b"\n") + 1, block.rfind(b"\n") + 1
            if not end:
                begun.add(block)
                continue
            if begun.is_long(first):
                long = too_long(bound).at(file.path, number)
                yield LineBatch(file.path, number, b"", opened.position(), (long,))
                if not options.skip:
                    return
                number, lines = number + 1, block[first:end]
            else:
                lines = begun.joined(block[:end])
            begun.restart(block[end:])
            if lines:
                batch = LineBatch(file.path, number, lines, opened.position())
                yield batch
                number += batch.num_lines
        if begun.size > bound:
            long = too_long(bound).at(file.path, number)
            yield LineBatch(file.path, number, b"", opened.position(), (long,))
        elif begun.size:
            yield LineBatch(file.path, number, begun.joined(b""), opened.position())


class _Begun:
    """The beginning of a line whose end is still to come; of a line too long only its size."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.size = 0
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._pieces.append(piece)
        if self.is_long(0):
            self._pieces.clear()

    def is_long(self, more: int) -> bool:
        return self.size + more > self._bound + 1  # the line end does not count

    def joined(self, last: bytes) -> bytes:
        return b"".join((*self._pieces, last))

    def restart(self, piece: bytes) -> None:
        self.size = 0
        self._pieces.clear()
        if piece:
            self.add(piece)
