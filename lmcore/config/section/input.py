"""The options that say how an input is read, alike in every command that takes them."""

from __future__ import annotations

from typing import Any

from lmcore.config.option import option

__all__ = [
    "INPUT_FORMATS",
    "delim_option",
    "document_per_option",
    "header_option",
    "input_format_option",
    "max_document_mib_option",
    "quotes_option",
]

INPUT_FORMATS = ("auto", "jsonl", "json", "text", "csv", "tsv", "parquet", "arrow")
"""What `input_format` may be."""


def input_format_option() -> Any:
    """Return the field `input_format`."""
    return option(
        "auto",
        "Format of the input; auto: by the files' names, JSON lines where they say nothing.",
        choices=INPUT_FORMATS,
    )


def document_per_option() -> Any:
    """Return the field `document_per`."""
    return option(
        "file",
        "What of a plain text is a document; paragraphs end at blank lines.",
        choices=("file", "line", "paragraph"),
    )


def delim_option() -> Any:
    """Return the field `delim`."""
    return option(
        None,
        "Sign, or tab, that parts the fields of a table; default: a comma in csv, a tab in tsv.",
        metavar="SIGN",
    )


def quotes_option() -> Any:
    """Return the field `quotes`."""
    return option(
        None, "Whether fields of a table may stand in double quotes; default: in csv, not in tsv."
    )


def header_option() -> Any:
    """Return the field `header`."""
    return option(
        True, "Whether a table's first row names its columns; without, the keys are 1, 2, 3."
    )


def max_document_mib_option() -> Any:
    """Return the field `max_document_mib`."""
    return option(
        64, "MiB of a document's text, or line; a longer one is an error.", minimum=1, maximum=1024
    )
