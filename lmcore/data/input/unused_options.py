"""Whether what is said of a format concerns any file of the input: a command asks before it reads.

What would change nothing is a mistake: of the flag, or of the format that the file's name tells.
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
    """Return a problem for each setting of *options* that no file is of a format for."""
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
                    hint=f"leave it out, or say by `--input-format {formats[0]}` what the input is",
                )
            )
    return found


def _given(options: InputOptions) -> dict[str, tuple[Format, ...]]:
    """Return the flags that are not at their defaults, and the formats that each is for."""
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
