"""`lmcore data repair`: repair names, a missing or damaged index, uncounted end tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import counted, printable
from lmcore.base.signals import clean_termination
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section

if TYPE_CHECKING:
    from lmcore.data.tools.repair import RepairReport, RepairRequest

__all__ = ["RepairSection", "run"]

_EPILOG = """\
No file is changed or removed: the repaired dataset gets the name of --output-prefix, or missing
files are added beside the original.

  lmcore data repair web_text_document --output-prefix repaired_text_document --eod 50256
  lmcore data repair web_text_document --hyphens"""


@dataclass(frozen=True)
class RepairSection:
    """Repair names, a missing or damaged index, uncounted end tokens."""

    prefix: str = option(REQUIRED, "Path of the dataset, with or without .bin or .idx.")
    output_prefix: str | None = option(
        None,
        "Path of the repaired dataset; default: add missing files.",
        metavar="PREFIX",
    )
    hyphens: bool = option(
        False, "Replace _ by - in its name; a corpus is the part of a name before the first -."
    )
    rebuild: bool = option(False, "Rebuild the index even if it is readable.")
    eod: int | None = option(None, "End-of-document id; default: from the metadata.", minimum=0)
    dtype: str | None = option(
        None,
        "Type of a stored token; default: from the index or the metadata.",
        choices=("uint8", "int8", "int16", "uint16", "int32", "int64"),
    )
    json: bool = option(False, "Print the summary as JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore data repair` and return the exit status."""
    section = parse_section(
        RepairSection,
        argv,
        command="lmcore data repair",
        positionals=("prefix",),
        epilog=_EPILOG,
    )
    from lmcore.data.tools.repair import RepairRequest, repair

    request = RepairRequest(
        section.prefix,
        output_prefix=section.output_prefix,
        hyphens=section.hyphens,
        rebuild=section.rebuild,
        eod=section.eod,
        dtype=section.dtype,
    )
    with clean_termination():
        report = repair(request)
    shown = json.dumps(report.to_json(), indent=2) if section.json else _summary(report, request)
    print(shown if section.json else printable(shown))
    return 0


def _summary(report: RepairReport, request: RepairRequest) -> str:
    counts = f"{counted(report.documents, 'document')}, {counted(report.tokens, 'token')}"
    lines = [f"{report.prefix}: {counts} of {report.dtype}, format {report.dataset_impl}"]
    lines += [f"  {text}" for text in report.found or ("nothing to repair",)]
    lines += [f"  new: {path}" for path in report.written]
    if request.hyphens and report.written:
        lines.append(
            f"  `{request.prefix}` stays as it is: move it to another directory before `lmcore "
            "data weights --input`, which refuses two datasets of the same content"
        )
    return "\n".join(lines)
