"""Texts that were split before: a line is a sentence (`--presplit-sentences`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LineSplitter"]


@dataclass(frozen=True)
class LineSplitter:
    """Takes every line for a sentence.

    Attributes:
        keep_newlines: Whether a sentence ends with its line end.
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
        """Return what decides the output."""
        return {"splitter": "lines", "keep_newlines": str(self.keep_newlines)}
