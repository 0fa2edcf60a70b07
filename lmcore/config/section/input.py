"""Input format options shared by all commands that read documents."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option

__all__ = ["INPUT_FORMATS", "InputSection"]

INPUT_FORMATS = ("auto", "jsonl", "json", "text", "csv", "tsv", "parquet", "arrow")
"""Choices of `input_format`."""


@dataclass(frozen=True, kw_only=True)
class InputSection:
    """Format of the input; the base of a command's section."""

    input_format: str = option(
        "auto",
        "Format of the input; auto: by file name, else JSON lines.",
        choices=INPUT_FORMATS,
    )
    document_per: str = option(
        "file",
        "Unit of plain text that becomes a document; paragraphs end at blank lines.",
        choices=("file", "line", "paragraph"),
    )
    delim: str | None = option(
        None,
        "Field delimiter of a table, a character or tab; default: comma for csv, tab for tsv.",
        metavar="CHAR",
    )
    quotes: bool | None = option(
        None, "Allow fields of a table in double quotes; default: yes for csv, no for tsv."
    )
    header: bool = option(
        True, "Take column names from the first row of a table; without it the keys are 1, 2, 3."
    )
    max_document_mib: int = option(
        64,
        "Size limit of a document or line, in MiB; a longer one is an error.",
        minimum=1,
        maximum=1024,
    )
