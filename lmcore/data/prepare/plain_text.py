"""Plain text to an indexed dataset: for the bundled text, or any other text file."""

from __future__ import annotations

import codecs
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.indexed.dataset import token_dtype
from lmcore.data.indexed.metadata import commit
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.input.compression import open_text
from lmcore.data.prepare.run import KeyReport, PrepareReport, document_prefix
from lmcore.data.tokenizer import Tokenizer

__all__ = ["documents_from_text", "prepare_documents", "prepare_text"]

_DOCUMENT_CHARACTERS = 2048
_LINE_BYTES = 1 << 20


def documents_from_text(
    path: str | Path, *, document_characters: int = _DOCUMENT_CHARACTERS
) -> Generator[str, None, None]:
    """Split a text into documents at blank lines; their concatenation is the text.

    Args:
        path: UTF-8 text, compressed or not.
        document_characters: minimum size of a document that ends at a blank line; after four times
            as many characters it ends at any line end.  A line of more than 1 MiB is split, so that
            memory is bounded.

    Raises:
        DataError: the file cannot be read, or is not UTF-8 (with the line number).
    """
    lines: list[str] = []
    size = 0
    for line in _lines(path):
        lines.append(line)
        size += len(line)
        blank = not line.strip()
        if (blank and size >= document_characters) or size >= 4 * document_characters:
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)


def _lines(path: str | Path) -> Generator[str, None, None]:
    """Yield the lines of a text, a very long one in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 1
    with open_text(str(path)) as stream:
        try:
            while raw := stream.readline(_LINE_BYTES):
                yield decoder.decode(raw)
                number += raw.endswith(b"\n")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise DataError(
                f"`{path}` line {number} is not UTF-8", hint="convert the file to UTF-8"
            ) from None


def prepare_text(
    path: str | Path,
    tokenizer: Tokenizer,
    output_prefix: str | Path,
    *,
    append_eod: bool = True,
    document_characters: int = _DOCUMENT_CHARACTERS,
) -> PrepareReport:
    """Tokenize a plain text into `PREFIX_text_document.{bin,idx,meta.json}`.

    Args:
        path: UTF-8 text, compressed or not.
        tokenizer: tokenizer of the documents.
        output_prefix: first part of the names of the output files.
        append_eod: end each document with the tokenizer's end-of-document id.
        document_characters: see `documents_from_text`.

    Raises:
        DataError: as `documents_from_text`; no text; a full disk.
        ConfigError: *append_eod* with a tokenizer that has no such id.
    """
    with closing(documents_from_text(path, document_characters=document_characters)) as documents:
        return prepare_documents(
            documents, tokenizer, output_prefix, source=str(path), append_eod=append_eod
        )


def prepare_documents(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    output_prefix: str | Path,
    *,
    source: str,
    append_eod: bool = True,
) -> PrepareReport:
    """Tokenize documents into `PREFIX_text_document.{bin,idx,meta.json}`.

    Args:
        documents: the documents, consumed one by one.
        tokenizer: tokenizer of the documents.
        output_prefix: first part of the names of the output files.
        source: origin of the documents, for messages.
        append_eod: end each document with the tokenizer's end-of-document id.

    Raises:
        DataError: no text; a full disk; errors of *documents*.
        ConfigError: *append_eod* with a tokenizer that has no such id.
    """
    if append_eod and tokenizer.eod is None:
        raise ConfigError(f"the tokenizer `{tokenizer.name}` has no end-of-document token")
    start = time.perf_counter()
    prefix = document_prefix(str(output_prefix), "text")
    writer = IndexedDatasetWriter(prefix, token_dtype(tokenizer.vocab_size))
    size = 0
    with closing(writer):
        for text in documents:
            ids = tokenizer.encode(text)
            if append_eod and tokenizer.eod is not None:
                ids.append(tokenizer.eod)
            writer.add_document(ids)
            size += len(text.encode())
        if not writer.tokens:
            raise DataError(f"`{source}` is empty")
        commit(writer, tokenizer, append_eod=append_eod)
    return PrepareReport(
        files=(source,),
        documents=writer.documents,
        json_bytes=size,
        seconds=time.perf_counter() - start,
        skipped={},
        outputs=(KeyReport.of("text", writer, empty=0),),
    )
