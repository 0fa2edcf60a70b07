"""`lmcore data repair`: mend names, an index that is missing or damaged, uncounted ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.cli.termination import clean_termination
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section
from lmcore.errors import counted

if TYPE_CHECKING:
    from lmcore.data.tools.repair import RepairReport

__all__ = ["RepairSection", "run"]

_EPILOG = """\
No file is changed or removed: what is mended gets the name of --output-prefix, or, where only a
name or the index is missing, is added beside the original.

  lmcore data repair web_text_document --output-prefix mended_text_document --eod 50256
  lmcore data repair web_text_document --hyphens"""


@dataclass(frozen=True)
class RepairSection:
    """Mend names, an index that is missing or damaged, ends that were not counted."""

    prefix: str = option(REQUIRED, "Path of the data set; endings in it do not matter.")
    output_prefix: str | None = option(
        None,
        "Path of the repaired data set; without it, missing files are added.",
        metavar="PREFIX",
    )
    hyphens: bool = option(
        False, "Name it with - for _, so that its corpus is what stands before the first one."
    )
    rebuild: bool = option(False, "Make the index anew although it can be read.")
    eod: int | None = option(
        None, "Id that ends a document; without it, that of the metadata.", minimum=0
    )
    dtype: str | None = option(
        None,
        "Type of a stored token; without it, that of the index or the metadata.",
        choices=("uint8", "int8", "int16", "uint16", "int32", "int64"),
    )
    json: bool = option(False, "Print the summary as JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore data repair` and return the exit status."""
    wanted = parse_section(
        RepairSection,
        argv,
        command="lmcore data repair",
        positionals=("prefix",),
        epilog=_EPILOG,
    )
    from lmcore.data.tools.repair import RepairRequest, repair

    request = RepairRequest(
        wanted.prefix,
        output_prefix=wanted.output_prefix,
        hyphens=wanted.hyphens,
        rebuild=wanted.rebuild,
        eod=wanted.eod,
        dtype=wanted.dtype,
    )
    with clean_termination():
        report = repair(request)
    print(json.dumps(report.to_json(), indent=2) if wanted.json else _summary(report))
    return 0


def _summary(report: RepairReport) -> str:
    counts = f"{counted(report.documents, 'document')}, {counted(report.tokens, 'token')}"
    lines = [f"{report.prefix}: {counts} of {report.dtype}, format {report.dataset_impl}"]
    lines += [f"  {text}" for text in report.found or ("nothing to repair",)]
    return "\n".join([*lines, *(f"  new: {path}" for path in report.written)])
