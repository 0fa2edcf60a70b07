"""Options of reading the input, for all formats, and the check that each has an effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.data.input.files import Format, InputFile

__all__ = ["DocumentUnit", "InputOptions", "unused_options"]

DocumentUnit = Literal["file", "line", "paragraph"]

_TEXT: tuple[Format, ...] = ("text",)
_TABLES: tuple[Format, ...] = ("csv", "tsv")


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


def unused_options(options: InputOptions, files: Sequence[InputFile]) -> list[LmcoreError]:
    """Return a problem for each of *options* that applies to none of *files*.

    An option without effect is a mistake, of the option or of the detected format.
    """
    if not files:
        return []
    present = {file.format for file in files}
    found: list[LmcoreError] = []
    for flag, formats in _given(options).items():
        if present.isdisjoint(formats):
            kind = "plain text" if formats == _TEXT else "a table"
            found.append(
                ConfigError(
                    f"`{flag}` cannot be combined with the input",
                    why=f"it is for {kind}, and `{files[0].path}` is read as {files[0].format}",
                    hint=f"omit it, or give the format with `--input-format {formats[0]}`",
                )
            )
    return found


def _given(options: InputOptions) -> dict[str, tuple[Format, ...]]:
    """Return the non-default flags, each with the formats that it applies to."""
    given: dict[str, tuple[Format, ...]] = {}
    if options.document_per != "file":
        given[f"--document-per {options.document_per}"] = _TEXT
    if options.delimiter is not None:
        given["--delim"] = _TABLES
    if options.quotes is not None:
        given["--quotes" if options.quotes else "--no-quotes"] = _TABLES
    if not options.header:
        given["--no-header"] = _TABLES
    return given
