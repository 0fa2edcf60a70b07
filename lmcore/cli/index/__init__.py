"""`lmcore index ...`: commands for indices of blocks of text, found by questions."""

from __future__ import annotations

from lmcore.cli.group import run_group

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """Run `lmcore index ...` and return the exit status."""
    return run_group("index", argv)
