"""Results of checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Result", "Status"]


class Status(StrEnum):
    """Status of a check."""

    PASSED = "passed"
    FAILED = "failed"
    GAP = "declared gap"
    NOT_RUN = "not run"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Result:
    """Result of one check.

    Attributes:
        id: The check's.
        status: status of the check.
        detail: finding, or reason why the check was not made, in one line.
        findings: mistakes, one line each.
        seconds: duration.
    """

    id: str
    status: Status
    detail: str = ""
    findings: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Return the result that `to_dict` described."""
        read = {"status": Status(values["status"]), "findings": tuple(values["findings"])}
        return cls(**(values | read))
