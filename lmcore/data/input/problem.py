"""What can be wrong with a document of the input, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmcore.errors import DataError

__all__ = ["BadDocument", "BadInputError", "Problem", "Reason", "Unit", "too_long"]

Reason = Literal[
    "not UTF-8",
    "broken JSON",
    "key missing",
    "not a string",
    "not encodable",
    "too long",
    "wrong number of fields",
    "quote not closed",
    "cut short",
    "damaged",
]

Unit = Literal["line", "row", "object", "document", "file"]


class BadInputError(DataError):
    """A document that cannot be used, and that is not to be skipped."""


@dataclass(frozen=True)
class Problem:
    """A document that cannot be used, or a file that cannot be read to its end.

    Attributes:
        source: The file.
        line: Number of the line, row, object or document, from 1; of no meaning for a file.
        reason: What is counted.
        detail: What was found there.
        hint: What to do; default: mend it.
        unit: What `line` counts.
    """

    source: str
    line: int
    reason: Reason
    detail: str
    hint: str | None = None
    unit: Unit = "line"

    @property
    def where(self) -> str:
        """The place, for messages."""
        return (
            f"`{self.source}`"
            if self.unit == "file"
            else (f"`{self.source}` {self.unit} {self.line}")
        )

    def error(self) -> BadInputError:
        """Return the error that stops the run."""
        mend = (
            "mend the file, or keep what can be read of it with `--on-error skip`"
            if self.unit == "file"
            else f"mend the {self.unit}, or leave such {self.unit}s out with `--on-error skip`"
        )
        return BadInputError(
            f"{self.where}: {self.reason}", why=self.detail, hint=self.hint or mend
        )


class BadDocument(Exception):  # noqa: N818  # never reaches a user: it becomes a `Problem`
    """Raised inside the readers for one document that cannot be used."""

    def __init__(self, reason: Reason, detail: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
        self.detail = detail
        self.hint = hint

    def at(self, source: str, line: int, unit: Unit = "line") -> Problem:
        """Return the problem with its place."""
        return Problem(source, line, self.reason, self.detail, self.hint, unit)


def too_long(bound: int) -> BadDocument:
    """Return what is wrong with a document of more than *bound* bytes."""
    size = f"{bound >> 20} MiB" if bound >= 1 << 20 else f"{bound} bytes"
    return BadDocument(
        "too long",
        f"it has more than {size}",
        "look whether it ends where it should, and raise `--max-document-mib` if so; "
        "or leave such documents out with `--on-error skip`",
    )
