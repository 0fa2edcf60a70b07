"""How an input is read, alike in every command that reads one."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option

__all__ = ["INPUT_FORMATS", "InputSection"]

INPUT_FORMATS = ("auto", "jsonl", "json", "text", "csv", "tsv", "parquet", "arrow")
"""What `input_format` may be."""


@dataclass(frozen=True, kw_only=True)
class InputSection:
    """Formats of the input; a command's section builds on it."""

    input_format: str = option(
        "auto",
        "Format of the input; auto: by the files' names, JSON lines where they say nothing.",
        choices=INPUT_FORMATS,
    )
    document_per: str = option(
        "file",
        "What of a plain text is a document; paragraphs end at blank lines.",
        choices=("file", "line", "paragraph"),
    )
    delim: str | None = option(
        None,
        "Sign, or tab, that parts the fields of a table; default: a comma in csv, a tab in tsv.",
        metavar="SIGN",
    )
    quotes: bool | None = option(
        None, "Whether fields of a table may stand in double quotes; default: in csv, not in tsv."
    )
    header: bool = option(
        True, "Whether a table's first row names its columns; without, the keys are 1, 2, 3."
    )
    max_document_mib: int = option(
        64, "MiB of a document's text, or line; a longer one is an error.", minimum=1, maximum=1024
    )
