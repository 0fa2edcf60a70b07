"""`lmcore checkpoint edit`: write an edited copy of a checkpoint."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.errors import ConfigError, printable
from lmcore.base.signals import clean_termination
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section

__all__ = ["EditSection", "run"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_EPILOG = """\
SOURCE is never changed; TARGET is a new run directory, which appears when it is complete.

  lmcore checkpoint edit runs/a runs/b --drop 'optimizer.*' 'rng.*'
  lmcore checkpoint edit runs/a runs/b --vocab-size 50432
  lmcore checkpoint edit runs/a runs/b --rename 'model\\.(.*)=old.\\1'"""


@dataclass(frozen=True)
class EditSection:
    """Write an edited copy of a checkpoint of lmcore."""

    source: str = option(REQUIRED, "Run directory, or one `iter_XXXXXXX`.", metavar="SOURCE")
    target: str = option(REQUIRED, "New run directory to write.", metavar="TARGET")
    ckpt_step: str | None = option(
        None, "Step of the checkpoint instead of the newest, or `best`.", metavar="STEP"
    )
    drop: tuple[str, ...] = option(
        (), "Leave these tensors out; `*` matches any characters.", metavar="NAME"
    )
    rename: tuple[str, ...] = option(
        (),
        "Rename tensors: a regular expression for the whole name, `=`, and the new name with "
        r"\1 for the first group.",
        metavar="OLD=NEW",
    )
    cast: tuple[str, ...] = option(
        (),
        f"Change the dtype of tensors: a pattern of names, `=`, and {', '.join(_DTYPES)}.",
        metavar="NAME=DTYPE",
    )
    vocab_size: int | None = option(
        None,
        "Rows of the embeddings: new rows are the mean of the tokens' rows, and 0 in the "
        "optimizer's state.",
        minimum=1,
    )
    cut_tokens: bool = option(False, "Let --vocab-size cut the rows of tokens, not only padding.")
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore checkpoint edit` and return the exit status."""
    section = parse_section(
        EditSection,
        argv,
        command="lmcore checkpoint edit",
        positionals=("source", "target"),
        epilog=_EPILOG,
    )
    if not (section.drop or section.rename or section.cast or section.vocab_size):
        raise ConfigError(
            "nothing to change", hint="give `--drop`, `--rename`, `--cast` or `--vocab-size`"
        )
    from lmcore.checkpoint import newest_verified, survey
    from lmcore.checkpoint.dcp_metadata import dtype_of
    from lmcore.cli.checkpoint.paths import checkpoint_at
    from lmcore.conversion.new_directory import new_directory
    from lmcore.conversion.tensors.edit import Changes, edit
    from lmcore.model.checkpoint_format import format_of

    changes = Changes(
        drop=section.drop,
        rename=tuple(_pair(text, "--rename", "OLD=NEW") for text in section.rename),
        cast=tuple(
            (pattern, dtype_of(_dtype(name)))
            for pattern, name in (_pair(text, "--cast", "NAME=DTYPE") for text in section.cast)
        ),
        vocab_size=section.vocab_size,
        cut_tokens=section.cut_tokens,
    )
    source = Path(section.source)
    if format_of(source) not in {None, "lmcore"}:
        raise ConfigError(
            f"`{source}` is no checkpoint of lmcore",
            why="only these are edited",
            hint=f"convert it first: `lmcore checkpoint convert {shlex.quote(str(source))} DIR "
            "--to lmcore`",
        )
    if section.ckpt_step is not None:
        source = checkpoint_at(section.source, section.ckpt_step)
    checkpoint = newest_verified(survey(source)).path
    target = Path(section.target)
    with clean_termination(), new_directory(target) as directory:
        notes = edit(checkpoint, directory, changes)
    if section.json:
        print(json.dumps({"source": str(checkpoint), "target": str(target), "notes": notes}))
        return 0
    lines = [f"{target}, from {checkpoint}", *(f"  note: {note}" for note in notes)]
    if not notes:
        lines += ["", f"next: lmcore checkpoint inspect {shlex.quote(str(target))}"]
    print(printable("\n".join(lines)))
    return 0


def _pair(text: str, flag: str, form: str) -> tuple[str, str]:
    """Return both sides of the last `=`."""
    left, separator, right = text.rpartition("=")
    if not separator or not left or not right:
        raise ConfigError(f"`{flag} {text}` is not {form}")
    return left, right


def _dtype(name: str) -> str:
    if name not in _DTYPES:
        raise ConfigError(f"`--cast`: unknown dtype `{name}`", hint=f"known: {', '.join(_DTYPES)}")
    return name
