"""`lmcore data ...`: commands for indexed datasets, corpora and tokenizers."""

from __future__ import annotations

from lmcore.cli.group import run_group

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """Run `lmcore data ...` and return the exit status."""
    return run_group("data", argv)
