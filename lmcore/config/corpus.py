"""`Corpus`: files of text under a name, which a run prepares when it trains on them.

A corpora file or `--corpora NAME=PATH` gives the names; `--train-data`, `--valid-data` and
`--test-data` take them, and paths of files without a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

__all__ = [
    "COMPRESSED",
    "DOCUMENT_UNITS",
    "TEXT_ENDINGS",
    "Corpus",
    "is_corpus_name",
    "is_text_path",
    "named_path",
    "names_text_files",
]

COMPRESSED = (".gz", ".gzip", ".zst", ".zstd", ".xz", ".bz2")
"""Endings of compressed files."""

TEXT_ENDINGS = (
    *(".jsonl", ".ndjson", ".jsonlines", ".json", ".txt", ".text", ".csv", ".tsv", ".tab"),
    *(".parquet", ".pq", ".arrow", ".feather"),
)
"""Endings of the files that a preparation reads."""

DOCUMENT_UNITS = ("file", "line", "paragraph")
"""Units of plain text that become a document each."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
_BEGINNINGS = ("/", "./", "../")
_WILDCARDS = "*?["


@dataclass(frozen=True)
class Corpus:
    """Files of text under a name.

    Attributes:
        name: Name, or the path itself if there is none.
        paths: Files, directories or patterns.
        json_key: Key, or column of a table, that has the text.
        input_format: Format of all files, or `auto`.
        document_per: Unit of plain text that becomes a document: file, line or paragraph.
        append_eod: End each document with an end-of-document token; None: if the tokenizer has one.
        skip: Leave out documents that cannot be used; else the first one is an error.
        summary: Description in one line; may be empty.
        where: Place that names it: "corpora.yaml:3", or a flag as typed; empty for a path.
    """

    name: str
    paths: tuple[str, ...]
    json_key: str = "text"
    input_format: str = "auto"
    document_per: str = "file"
    append_eod: bool | None = None
    skip: bool = False
    summary: str = ""
    where: str = ""

    @property
    def shown(self) -> str:
        """Description in messages."""
        place = f" ({self.where})" if self.where else ""
        return f"corpus `{self.name}`{place}"


def is_text_path(word: str) -> bool:
    """Return True if a value of `--train-data` and its like is a path rather than a name.

    The word alone decides, not the file system: it begins with `/`, `./` or `../`, has a wildcard,
    or ends as a file of text does, compressed or not.
    """
    return word.startswith(_BEGINNINGS) or names_text_files(word)


def is_corpus_name(word: str) -> bool:
    """Return True for a text that a corpus may have as its name, which reads as no path."""
    return _NAME.fullmatch(word) is not None and not is_text_path(word)


def names_text_files(word: str) -> bool:
    """Return True if a path has a wildcard or ends as a file of text does, compressed or not."""
    if any(character in word for character in _WILDCARDS):
        return True
    return PurePath(word.lower()).suffix in {*COMPRESSED, *TEXT_ENDINGS}


def named_path(word: str) -> tuple[str, str] | None:
    """Return name and path of "NAME=PATH", a value of `--valid-data`; None for another value.

    A path may have the character, too.
    """
    name, equals, path = (part.strip() for part in word.partition("="))
    if not equals or ("/" in name and is_text_path(word)):
        return None
    return name, path
