"""`lmcore data inspect`: show what an indexed data set holds, and check it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.cli.terminal_text import size_text
from lmcore.config.command_line import parse_section
from lmcore.config.option import REQUIRED, option

if TYPE_CHECKING:
    from lmcore.data.inspect import InspectReport

__all__ = ["InspectSection", "run"]


@dataclass(frozen=True)
class InspectSection:
    """Show what an indexed data set holds, and check it."""

    prefix: str = option(REQUIRED, "Path of the data set without .bin or .idx.")
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore data inspect` and return the exit status."""
    wanted = parse_section(
        InspectSection, argv, command="lmcore data inspect", positionals=("prefix",)
    )
    from lmcore.data.inspect import inspect

    report = inspect(wanted.prefix.removesuffix(".bin").removesuffix(".idx"))
    print(json.dumps(report.to_json(), indent=2) if wanted.json else _description(report))
    return 1 if report.problems else 0


def _description(report: InspectReport) -> str:
    counts = {
        "documents": report.documents,
        "sequences": report.sequences,
        "tokens": report.tokens,
        "empty sequences": report.empty_sequences,
        "longest sequence": report.max_length,
    }
    rows = [(name, f"{count:,}") for name, count in counts.items() if count is not None]
    if report.mean_length is not None:
        rows.append(("mean sequence", f"{report.mean_length:,.1f}"))
    rows += [
        ("token type", report.dtype or "unknown"),
        ("tokenizer", report.tokenizer or "not recorded"),
        ("size", size_text(report.bytes)),
    ]
    lines = [report.prefix, *(f"  {name:<18}{value}" for name, value in rows)]
    if not report.problems:
        return "\n".join([*lines, "  sound: sizes, pointers and documents fit together"])
    return "\n".join([*lines, *(f"  problem: {text}" for text in report.problems)])
