"""Reader of JSON lines: blocks of complete lines, without work per line.

The lines are parsed by the encoder.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from lmcore.base.errors import DataError
from lmcore.data.input.batch import LineBatch
from lmcore.data.input.compression import STDIN, blocks, open_input
from lmcore.data.input.files import MAGIC, InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import too_long

__all__ = ["read"]


def read(file: InputFile, options: InputOptions) -> Generator[LineBatch, None, None]:
    """Yield the lines of *file*; a line longer than the bound is a problem and skipped.

    Raises:
        DamagedError: it cannot be read to its end; all complete lines before were yielded.
        DataError: it cannot be read at all, or is Parquet or Arrow.
    """
    bound = options.max_document_bytes
    partial = _PartialLine(bound)
    number = 1
    with open_input(file.path) as opened:
        for block in blocks(opened, min(options.batch_bytes, bound)):
            if number == 1 and not partial.size:
                _require_text(block, file.path)
            first, end = block.find(b"\n") + 1, block.rfind(b"\n") + 1
            if not end:
                partial.add(block)
                if partial.is_long(0) and not options.skip:  # it may have no end
                    long = too_long(bound).at(file.path, number)
                    yield LineBatch(file.path, number, b"", opened.position(), (long,))
                    return
                continue
            if partial.is_long(first):
                long = too_long(bound).at(file.path, number)
                yield LineBatch(file.path, number, b"", opened.position(), (long,))
                if not options.skip:
                    return
                number, lines = number + 1, block[first:end]
            else:
                lines = partial.joined(block[:end])
            partial.restart(block[end:])
            if lines:
                batch = LineBatch(file.path, number, lines, opened.position())
                yield batch
                number += batch.num_lines
        if partial.size > bound:
            long = too_long(bound).at(file.path, number)
            yield LineBatch(file.path, number, b"", opened.position(), (long,))
        elif partial.size:
            yield LineBatch(file.path, number, partial.joined(b""), opened.position())


def _require_text(start: bytes, path: str) -> None:
    """Raise if the content is Parquet or Arrow, from a pipe or with a wrong name."""
    for magic, format_ in MAGIC.items():
        if start.startswith(magic):
            raise DataError(
                f"`{path}` is not JSON lines",
                why=f"it begins like {format_.capitalize()}",
                hint=f"add `--input-format {format_}`"
                if path != STDIN and Path(path).is_file()
                else "write it to a file first",
            )


class _PartialLine:
    """Beginning of an incomplete line; only its size if it is too long."""

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
