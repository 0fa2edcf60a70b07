"""Check that each format option applies to some input file, before anything is read.

An option without effect is a mistake, of the option or of the detected format.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcore.data.input.files import Format, InputFile
from lmcore.data.input.options import InputOptions
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["unused_options"]

_TEXT: tuple[Format, ...] = ("text",)
_TABLES: tuple[Format, ...] = ("csv", "tsv")


def unused_options(options: InputOptions, files: Sequence[InputFile]) -> list[LmcoreError]:
    """Return a problem for each of *options* that applies to none of *files*."""
    if not files:
        return []
    present = {file.format for file in files}
    found: list[LmcoreError] = []
    for flag, formats in _given(options).items():
        if present.isdisjoint(formats):
            kind = "plain text" if formats == _TEXT else "a table"
            found.append(
                ConfigError(
                    f"`{flag}` does not go with the input",
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
