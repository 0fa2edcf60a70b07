"""Findings of a check that tries a function of the device in many cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmcore.base.errors import counted
from lmcore_conformance.registry import conclude

__all__ = ["CaseFindings"]

_MOST = 8
"""Findings that a report shows."""


class CaseFindings:
    """Findings of a check, and the numbers of cases with and without a kernel."""

    def __init__(self) -> None:
        """Create an account without cases."""
        self.found: list[str] = []
        self.tried = self.refused = 0

    @contextmanager
    def case(self, label: str) -> Iterator[None]:
        """Take an exception in a case as a finding.

        Args:
            label: The case, in words.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a device may raise anything
            first = str(error).strip().partition("\n")[0]
            self.add(label, f"it raised {type(error).__name__}: {first:.200}")

    def add(self, label: str, fault: str | None) -> None:
        """Add what is wrong in a case; None: nothing is."""
        if fault:
            self.found.append(f"{label}: {fault}")

    def conclude(self) -> str:
        """Return a line on the cases.

        Raises:
            Failure: Something is wrong.
        """
        more = len(self.found) - _MOST
        shown = self.found[:_MOST] + ([f"and {more} more"] if more > 0 else [])
        without = f", None for {self.refused}" if self.refused else ""
        return conclude(shown, f"{counted(self.tried, 'case')}{without}")
