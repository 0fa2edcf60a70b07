"""Entries of a directory that may be a checkpoint of any format."""

from __future__ import annotations

from pathlib import Path

__all__ = ["sorted_entries"]


def sorted_entries(path: Path) -> list[Path]:
    """Return the entries of a directory by name; none if it is not one, or cannot be read."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []
