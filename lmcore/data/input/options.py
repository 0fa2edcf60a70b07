"""Options of reading the input, for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DocumentUnit", "InputOptions"]

DocumentUnit = Literal["file", "line", "paragraph"]


@dataclass(frozen=True)
class InputOptions:
    """Options of the readers.

    Attributes:
        keys: keys or columns whose text is read.
        document_per: unit of plain text that becomes a document; paragraphs end at blank lines.
        delimiter: field delimiter of a table; None: by the format.
        quotes: allow quoted fields; None: yes in csv, no in tsv.
        header: take column names from the first row of a table; else they are 1, 2, 3.
        max_document_bytes: size limit of a document, in bytes; also bounds the memory of readers.
        batch_bytes: size of a batch, in bytes; the document that reaches it is the last.
        skip: skip and count problems; else the first one ends the run.
        key_flags: command-line option of each of `keys`, for messages; a single one is for all.
    """

    keys: tuple[str, ...] = ("text",)
    document_per: DocumentUnit = "file"
    delimiter: str | None = None
    quotes: bool | None = None
    header: bool = True
    max_document_bytes: int = 64 << 20
    batch_bytes: int = 1 << 20
    skip: bool = False
    key_flags: tuple[str, ...] = ("--json-keys",)

    def key_flag(self, key: str) -> str:
        """Return the command-line option of *key*."""
        flags = dict(zip(self.keys, self.key_flags, strict=False))
        return flags.get(key, self.key_flags[0])
