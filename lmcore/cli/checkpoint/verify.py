"""`lmcore checkpoint verify`: compare checkpoints with their checksums."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointError, printable
from lmcore.cli.text.terminal import size_text
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["VerifySection", "run"]

_EPILOG = """\
The exit status is 1 if a checkpoint is damaged.

  lmcore checkpoint verify runs/my-run
  lmcore checkpoint verify runs/my-run/checkpoints/iter_0000100 --json"""


@dataclass(frozen=True)
class VerifySection:
    """Compare checkpoints with their checksums: every byte of every file is read."""

    path: str = option(
        REQUIRED,
        "Run directory or its `checkpoints` (all of them), one `iter_XXXXXXX`, or a directory of "
        "another program, whose tensors are read.",
        metavar="PATH",
    )
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore checkpoint verify` and return the exit status."""
    section = parse_section(
        VerifySection,
        argv,
        command="lmcore checkpoint verify",
        positionals=("path",),
        epilog=_EPILOG,
    )
    records = []
    for record, part in _verified(Path(section.path)):
        records.append(record)
        if not section.json:
            print(printable(_line(record, part)), flush=True)
    if section.json:
        print(json.dumps(records, indent=2))
    return 1 if any(record["problems"] for record in records) else 0


def _verified(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield path, size, time, problems and format of each checkpoint, and which part was read."""
    import torch  # noqa: F401 - its import is not part of the time

    from lmcore.checkpoint import survey, verify_checkpoint
    from lmcore.conversion.formats import unrecognized
    from lmcore.model.checkpoint_format import format_of

    name = format_of(path) if path.is_dir() else None
    if (problem := unrecognized(path)) is not None:
        raise problem
    if name not in {None, "lmcore"}:
        yield _foreign_record(path, name)
        return
    found = survey(path)
    for checkpoint in sorted([*(one for one, _ in found.readable), *found.unreadable]):
        error = found.unreadable.get(checkpoint)
        problems = partial(verify_checkpoint, checkpoint)
        if error is not None:
            problems = partial(list, [error.what_and_why])
        yield _record(checkpoint, problems) | {"format": "lmcore"}, ""


def _record(path: Path, problems: Callable[[], list[str]]) -> dict[str, Any]:
    begin = time.perf_counter()
    found = problems()
    seconds = time.perf_counter() - begin
    return {
        "path": str(path),
        "checked": str(path),
        "bytes": _size(path),
        "seconds": round(seconds, 3),
        "problems": found,
    }


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _foreign_record(path: Path, name: str | None) -> tuple[dict[str, Any], str]:
    """Read all tensors of another program's checkpoint; return the record and which part was read.

    The record has the directory whose files were read, such as the newest of several checkpoints.
    """
    from lmcore.conversion.formats import read_state

    files, part = path, ""

    def problems() -> list[str]:
        nonlocal files, part
        try:
            state = read_state(path, name)
            files = state.files
            if files != path:
                inside = files.relative_to(path) if files.is_relative_to(path) else files
                part = f": {state.part.format(inside)}"
            for kind in state.kinds:
                for parameter in state.parameters:
                    state.read(parameter, kind).sum()
        except CheckpointError as error:
            return [error.what_and_why]
        return []

    found = _record(path, problems)
    found |= {"checked": str(files), "bytes": _size(files), "format": name}
    return found, part


def _line(record: dict[str, Any], part: str) -> str:
    speed = size_text(record["bytes"] / max(record["seconds"], 1e-9))
    about = f"{size_text(record['bytes'])} in {record['seconds']:.1f} s, {speed}/s"
    # Without checksums, what cannot be read may also be a model that lmcore does not have.
    own = record["format"] == "lmcore"
    good, bad = ("intact", "DAMAGED") if own else ("can be read", "CANNOT BE READ")
    if not record["problems"]:
        return f"{record['path']}  {good}{part}  ({about})"
    problems = "\n".join(f"  {problem}" for problem in record["problems"])
    return f"{record['path']}  {bad}{part}\n{problems}"
