"""Reader of plain text: a file, a line or a paragraph is a document."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import BinaryIO

from lmcore.data.input.batch import TextBatch
from lmcore.data.input.compression import BOM, Opened, blocks, open_input
from lmcore.data.input.document import (
    InputDocument,
    batch_documents,
    key_missing,
    require_utf8,
    unusable_file,
)
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import DocumentUnit, InputOptions
from lmcore.data.input.problem import BadDocument, Unit, too_long

__all__ = ["KEY", "read"]

KEY = "text"
_PIECE_BYTES = 1 << 16


def read(file: InputFile, options: InputOptions) -> Generator[TextBatch, None, None]:
    """Yield the documents of *file*, under the key `text`.

    The line end of a line or paragraph is removed; a file is kept as it is.

    Raises:
        DamagedError: it cannot be read to its end; all complete documents before were yielded.
        DataError: it cannot be read at all.
    """
    for key in options.keys:
        if key != KEY:
            bad = key_missing(key, [KEY], options.key_flag(key), called="plain text has the key")
            yield unusable_file(file, options, bad)
            return
    unit: Unit = "document" if options.document_per == "file" else "line"
    with open_input(file.path) as opened:
        documents = _WAYS[options.document_per](opened, options)
        yield from batch_documents(file, options, unit, documents, opened.position)


def _document(number: int, raw: bytes) -> InputDocument:
    try:
        return InputDocument(
            number, len(raw), (require_utf8(raw.decode(errors="surrogateescape")),)
        )
    except BadDocument as bad:
        return InputDocument(number, len(raw), bad)


def _whole(opened: Opened, options: InputOptions) -> Iterator[InputDocument]:
    pieces: list[bytes] = []
    size = 0
    for piece in blocks(opened, options.batch_bytes):
        pieces.append(piece)
        size += len(piece)
        if size > options.max_document_bytes:
            long = too_long(options.max_document_bytes)
            hint = f"use smaller documents with `--document-per paragraph`, or {long.hint}"
            yield InputDocument(1, size, BadDocument(long.reason, long.detail, hint))
            return
    if size:
        yield _document(1, b"".join(pieces))


def _lines(opened: Opened, options: InputOptions) -> Iterator[InputDocument]:
    for number, line in _raw_lines(opened.stream, options):
        if isinstance(line, int):
            yield InputDocument(number, line, too_long(options.max_document_bytes))
        elif text := line.rstrip(b"\r\n"):
            yield _document(number, text)


def _paragraphs(opened: Opened, options: InputOptions) -> Iterator[InputDocument]:
    bound = options.max_document_bytes
    lines: list[bytes] = []
    size = first = 0
    for number, line in _raw_lines(opened.stream, options):
        if not isinstance(line, int) and not line.strip():
            if size:
                yield _paragraph(first, lines, size, bound)
            lines, size = [], 0
            continue
        first = first if size else number
        size += line if isinstance(line, int) else len(line)
        if size > bound + 2:  # the last line end does not count
            lines.clear()
            if not options.skip:
                break
        elif not isinstance(line, int):
            lines.append(line)
    if size:
        yield _paragraph(first, lines, size, bound)


def _paragraph(first: int, lines: list[bytes], size: int, bound: int) -> InputDocument:
    raw = b"".join(lines).rstrip(b"\r\n")
    return (
        _document(first, raw)
        if raw and len(raw) <= bound
        else (InputDocument(first, size, too_long(bound)))
    )


_WAYS: dict[DocumentUnit, Callable[[Opened, InputOptions], Iterator[InputDocument]]] = {
    "file": _whole,
    "line": _lines,
    "paragraph": _paragraphs,
}


def _raw_lines(stream: BinaryIO, options: InputOptions) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number of each line and the line, or its size if it is too long.

    The rest of such a line is read only to skip it: it may have no end.
    """
    number, bound = 1, options.max_document_bytes
    while line := stream.readline(bound + 2 + len(BOM)):
        if number == 1:
            line = line.removeprefix(BOM)
        size, piece = len(line), line
        while (options.skip or size <= bound + 2) and not piece.endswith(b"\n"):
            piece = stream.readline(_PIECE_BYTES)
            size += len(piece)
            if not piece:
                break
        is_long = size > bound + 2 or len(line.rstrip(b"\r\n")) > bound
        yield number, size if is_long else line
        number += 1
