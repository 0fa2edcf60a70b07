"""Texts with one sentence per line (`--presplit-sentences`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LineSplitter"]


@dataclass(frozen=True)
class LineSplitter:
    """Splitter into lines.

    Attributes:
        keep_newlines: keep the line end as part of a sentence.
    """

    keep_newlines: bool = False

    def split(self, text: str) -> Sequence[str]:
        """Return the lines that are not blank."""
        lines = text.split("\n")
        if self.keep_newlines:
            lines = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
        else:
            lines = [line.removesuffix("\r") for line in lines]
        return [line for line in lines if line.strip()]

    def describe(self) -> dict[str, str]:
        """Return the settings."""
        return {"splitter": "lines", "keep_newlines": str(self.keep_newlines)}
