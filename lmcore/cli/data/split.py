"""`lmcore data split`: split datasets, or JSON lines into train, dev and test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, counted, printable
from lmcore.base.signals import clean_termination
from lmcore.cli.text.terminal import size_text
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section

if TYPE_CHECKING:
    from lmcore.data.tools.split import IndexedSplitReport, JsonSplitReport

__all__ = ["SplitSection", "run"]

_EPILOG = """\
Indexed datasets are split by a number of documents, JSON lines by fractions.

  lmcore data split --datasets web_text_document --output-prefix web --samples 100000
  lmcore data split --input-files web.jsonl --output-dir parts --test-percent 0.05 0.05"""

_INDEXED = ("datasets", "input", "output_prefix", "samples")
_LINES = ("input_files", "output_dir", "test_percent")


@dataclass(frozen=True)
class SplitSection:
    """Split indexed datasets into smaller ones, or JSON lines into train, dev and test."""

    datasets: tuple[str, ...] = option(
        (), "Paths of datasets, without .bin or .idx, in this order.", metavar="PREFIX"
    )
    input: str | None = option(
        None, "Directory of datasets, all of them in the order of their names.", metavar="DIR"
    )
    output_prefix: str | None = option(
        None, "First part of the new paths: PREFIX-00000 and so on.", metavar="PREFIX"
    )
    samples: int | None = option(None, "Documents of each new dataset, except the last.", minimum=1)
    input_files: tuple[str, ...] = option(
        (), "Files or quoted patterns of JSON lines, compressed or not.", metavar="FILE"
    )
    output_dir: str | None = option(
        None,
        "Directory for train.json, dev.json and test.json, each with a .map of file and line.",
        metavar="DIR",
    )
    test_percent: tuple[float, ...] = option(
        (), "Fraction of the lines for dev and, optionally, for test: 0.05 is 5%."
    )
    seed: int = option(1234, "Seed of the random split.")
    json: bool = option(False, "Print the summary as JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore data split` and return the exit status."""
    section = parse_section(SplitSection, argv, command="lmcore data split", epilog=_EPILOG)
    given = {name: getattr(section, name) for name in (*_INDEXED, *_LINES)}
    lines = _kind(given) == _LINES
    with clean_termination():
        report = _split_lines(section) if lines else _split_indexed(section)
    if section.json:
        print(json.dumps(report.to_json(), indent=2))
    return 0


def _kind(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the group of options in use.

    Raises:
        ConfigError: options of both groups, or a missing one.
    """
    used = [name for name, value in given.items() if value not in ((), None)]
    indexed, lines = ([name for name in used if name in kind] for kind in (_INDEXED, _LINES))
    if indexed and lines:
        raise ConfigError(
            f"{_flag(indexed[0])} and {_flag(lines[0])} exclude each other",
            why="one is for indexed datasets, the other for JSON lines",
        )
    if not used:
        raise ConfigError("`--datasets`, `--input` or `--input-files` is required")
    if lines:
        needed = list(_LINES)
    else:
        needed = ["input" if "input" in used else "datasets", "output_prefix", "samples"]
    problems = [ConfigError(f"{_flag(name)} is required") for name in needed if name not in used]
    if {"datasets", "input"} <= set(used):
        problems.append(ConfigError("`--datasets` and `--input` exclude each other"))
    if problems:
        raise ConfigError.collect(problems)
    return _LINES if lines else _INDEXED


def _flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _split_lines(section: SplitSection) -> JsonSplitReport:
    from lmcore.data.tools.split import split_json

    assert section.output_dir is not None
    report = split_json(
        section.input_files, section.output_dir, shares=section.test_percent, seed=section.seed
    )
    if not section.json:
        lines, files = counted(report.lines, "line"), counted(len(report.files), "file")
        print(f"{lines} of {files} in {report.seconds:.1f} s")
        for part in report.parts:
            print(printable(f"  {part.path:<30} {counted(part.lines, 'line')}"))
    return report


def _split_indexed(section: SplitSection) -> IndexedSplitReport:
    from lmcore.config.derived.data_source import without_ending
    from lmcore.data.tools.merge import chosen_datasets
    from lmcore.data.tools.split import split_indexed

    assert section.output_prefix is not None
    assert section.samples is not None
    prefixes = chosen_datasets(section.datasets, section.input)
    report = split_indexed(prefixes, without_ending(section.output_prefix), samples=section.samples)
    if not section.json:
        documents = counted(report.documents, "document")
        print(f"{documents} of {counted(report.datasets, 'dataset')} in {report.seconds:.1f} s")
        for file in report.files:
            documents = counted(file.documents, "document")
            print(printable(f"  {file.prefix:<30} {documents}, {size_text(file.bytes)}"))
    return report
