"""How the input is to be read: what the flags of a command say, for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DocumentUnit", "InputOptions"]

DocumentUnit = Literal["file", "line", "paragraph"]


@dataclass(frozen=True)
class InputOptions:
    """What the readers need to know.

    Attributes:
        keys: Keys or columns whose text is wanted.
        document_per: What of a plain text is a document; paragraphs end at blank lines.
        delimiter: What parts the fields of a table; None: by the format.
        quotes: Whether fields may stand in quotes; None: in csv they may, in tsv not.
        header: Whether a table's first row names its columns; else they are called 1, 2, 3.
        max_document_bytes: A longer document is a problem; no reader holds much more at a time.
        batch_bytes: A batch ends with the document that reaches so many bytes.
        skip: Whether problems are counted and left behind; else the first one ends the run.
        key_flags: The flag of the command by which each of `keys` is named, for messages; a single
            one: all of them.
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
        """Return the flag that names *key*."""
        flags = dict(zip(self.keys, self.key_flags, strict=False))
        return flags.get(key, self.key_flags[0])
