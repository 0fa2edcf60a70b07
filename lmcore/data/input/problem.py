"""Problems of input documents, with their position in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmcore.base.errors import DataError, counted

__all__ = ["BadDocument", "BadInputError", "InputProblem", "Reason", "Unit", "too_long"]

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
    """Error for a bad document that is not skipped."""


@dataclass(frozen=True)
class InputProblem:
    """Document that cannot be used, or file that cannot be read to its end.

    Attributes:
        source: path of the file.
        line: number of the line, row, object or document, from 1; unused for a file.
        reason: kind of the problem, for the counts.
        detail: cause.
        hint: remedy; default: fix it or skip it.
        unit: unit that `line` counts.
    """

    source: str
    line: int
    reason: Reason
    detail: str
    hint: str | None = None
    unit: Unit = "line"

    @property
    def where(self) -> str:
        """Position, for messages."""
        return (
            f"`{self.source}`"
            if self.unit == "file"
            else (f"`{self.source}` {self.unit} {self.line}")
        )

    def error(self) -> BadInputError:
        """Return the error that stops the run."""
        remedy = (
            "fix the file, or keep its readable part with `--on-error skip`"
            if self.unit == "file"
            else f"fix the {self.unit}, or skip such {self.unit}s with `--on-error skip`"
        )
        return BadInputError(
            f"{self.where}: {self.reason}", why=self.detail, hint=self.hint or remedy
        )


class BadDocument(Exception):  # noqa: N818  # never reaches a user: it becomes an `InputProblem`
    """Exception inside the readers for one document that cannot be used."""

    def __init__(self, reason: Reason, detail: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
        self.detail = detail
        self.hint = hint

    def at(self, source: str, line: int, unit: Unit = "line") -> InputProblem:
        """Return the problem at a position."""
        return InputProblem(source, line, self.reason, self.detail, self.hint, unit)


def too_long(bound: int) -> BadDocument:
    """Return the exception for a document of more than *bound* bytes."""
    size = f"{bound >> 20} MiB" if bound >= 1 << 20 else counted(bound, "byte")
    return BadDocument(
        "too long",
        f"it has more than {size}",
        "check that it ends correctly, and raise `--max-document-mib` if so; or skip such "
        "documents with `--on-error skip`",
    )
