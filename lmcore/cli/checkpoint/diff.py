"""`lmcore checkpoint diff`: compare two checkpoints tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from lmcore.base.errors import counted, printable
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section

if TYPE_CHECKING:
    from lmcore.conversion.tensors.difference import Difference

__all__ = ["DiffSection", "run"]

_LISTED = 20
"""Largest number of missing tensors of a kind that are listed by name; `--json` lists all."""
_EPILOG = """\
The exit status is 1 if a tensor or the model's shape differs; with --tolerance a dtype may.

  lmcore checkpoint diff runs/a runs/b --tensors 'model.*'
  lmcore checkpoint diff runs/a downloads/llama --tensors 'model.*' --tolerance 1e-3"""


@dataclass(frozen=True)
class DiffSection:
    """Compare two checkpoints, of any formats, tensor by tensor."""

    first: str = option(REQUIRED, "Checkpoint: see `lmcore checkpoint inspect`.", metavar="A")
    second: str = option(REQUIRED, "The other checkpoint.", metavar="B")
    tensors: tuple[str, ...] = option(
        (), "Compare these tensors only; `*` matches any characters.", metavar="NAME"
    )
    tolerance: float = option(
        0.0,
        "Largest absolute difference of values that count as equal; above 0, in any dtypes.",
        minimum=0,
    )
    settings: bool = option(False, "Show the settings of the runs that differ, too.")
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore checkpoint diff` and return the exit status."""
    section = parse_section(
        DiffSection,
        argv,
        command="lmcore checkpoint diff",
        positionals=("first", "second"),
        epilog=_EPILOG,
    )
    from lmcore.cli.checkpoint.paths import checkpoint_at
    from lmcore.conversion.tensors.content import content_of
    from lmcore.conversion.tensors.difference import compare

    found = compare(
        content_of(checkpoint_at(section.first), verify=True),
        content_of(checkpoint_at(section.second), verify=True),
        patterns=section.tensors,
        tolerance=section.tolerance,
    )
    if section.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(printable("\n".join(_lines(found, section))))
    return 1 if found.found else 0


def _missing(names: Sequence[str], where: str, other: str) -> Iterator[str]:
    """Yield the tensors that one checkpoint alone has; many of one kind in one line."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.partition(".")[0], []).append(name)
    for found in kinds.values():
        if len(found) > _LISTED:
            parts = (
                set(level) for level in zip(*(name.split(".") for name in found), strict=False)
            )
            common = ".".join(min(one) for one in takewhile(lambda one: len(one) == 1, parts))
            yield f"only in {where}, not in {other}  {counted(len(found), 'tensor')} `{common}.*`"
        else:
            yield from (f"only in {where}, not in {other}  {name}" for name in found)


def _lines(found: Difference, section: DiffSection) -> Iterator[str]:
    for name, (ours, theirs) in found.shape.items():
        yield f"model shape  {name}: {ours} -> {theirs}"
    yield from _missing(found.only_first, section.first, section.second)
    yield from _missing(found.only_second, section.second, section.first)
    for name, (before, after) in found.forms.items():
        yield f"{name}  {before} -> {after}"
    if found.values:
        width = max(len(one.name) for one in found.values)
        for one in found.values:
            yield (
                f"{one.name:<{width}}  largest difference {one.largest:.3g}, relative "
                f"{one.relative:.3g}, {counted(one.count, 'value')}"
            )
    if section.settings:
        for name, (ours, theirs) in found.settings.items():
            yield f"setting  {name}: {ours} -> {theirs}"
    elif found.settings:
        yield f"{counted(len(found.settings), 'setting')} of the runs differ (`--settings`)"
    within = f" within {section.tolerance:g}" if section.tolerance else ""
    yield f"{counted(found.equal, 'tensor')} equal{within}, {found.unequal} not"
