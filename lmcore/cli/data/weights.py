"""`lmcore data weights`: weights of datasets from their tokens, for a data file list."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, counted
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section

if TYPE_CHECKING:
    from lmcore.data.blend.weights import DatasetTokens

__all__ = ["WeightsSection", "run"]

_EPILOG = """\
A corpus is the name of a file up to its first `-`. Its weight is its tokens times its epochs,
divided over its files by their tokens. The epochs file has lines of `corpus epochs`.

  lmcore data weights --input /data/tokens --epochs epochs.txt --output train.list"""


@dataclass(frozen=True)
class WeightsSection:
    """Compute weights of datasets from their tokens, for a data file list."""

    datasets: tuple[str, ...] = option(
        (), "Paths of datasets; only their .idx is needed.", metavar="PREFIX"
    )
    input: tuple[str, ...] = option((), "Directories of datasets, all of them.", metavar="DIR")
    metadata: str | None = option(
        None,
        "JSON list of data_prefix and total_num_tokens, instead of datasets.",
        metavar="FILE",
    )
    epochs: str | None = option(
        None, "File of the epochs of each corpus; default: one each.", metavar="FILE"
    )
    rebase: tuple[str, ...] = option(
        (),
        "Old and new directory of the data, or several such pairs.",
        metavar="DIR",
    )
    metadata_output: str | None = option(
        None, "File for the token counts, as --metadata reads them.", metavar="FILE"
    )
    output: str | None = option(
        None, "File for the list; default: standard output.", metavar="FILE"
    )
    overwrite: bool = option(False, "Replace existing files of --output and --metadata-output.")
    json: bool = option(False, "Print the list as JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore data weights` and return the exit status."""
    section = parse_section(WeightsSection, argv, command="lmcore data weights", epilog=_EPILOG)
    _check(section)
    from lmcore.data.blend.file_list import format_data_file_list
    from lmcore.data.blend.weights import Move, format_token_counts, read_epochs, rebase, weigh

    epochs = None if section.epochs is None else read_epochs(section.epochs)
    pairs = zip(section.rebase[::2], section.rebase[1::2], strict=True)
    counts = rebase(_counts(section), [Move(old, new) for old, new in pairs])
    files = weigh(counts, epochs)
    listed = format_data_file_list(files)
    if section.metadata_output is not None:
        _write(section.metadata_output, format_token_counts(counts))
    if section.output is not None:
        _write(section.output, listed)
        corpora = len({file.corpus for file in files})
        tokens = sum(dataset.total_num_tokens for dataset in counts)
        print(
            f"{section.output}: {counted(len(files), 'dataset')} of "
            f"{corpora:,} {'corpus' if corpora == 1 else 'corpora'}, {counted(tokens, 'token')}",
            file=sys.stderr,
        )
    if section.json:
        print(json.dumps([asdict(file) for file in files], indent=2))
    elif section.output is None:
        print(listed, end="")
    return 0


def _check(section: WeightsSection) -> None:
    given = bool(section.datasets or section.input)
    if given == (section.metadata is not None):
        raise ConfigError(
            "`--metadata` excludes `--datasets` and `--input`"
            if given
            else "`--datasets`, `--input` or `--metadata` is required"
        )
    if len(section.rebase) % 2:
        raise ConfigError(
            f"`--rebase` has {counted(len(section.rebase), 'directory', 'directories')}",
            why="they must be pairs of an old and a new one",
        )
    from lmcore.data.existing_output import require_unused

    for name in ("output", "metadata_output"):
        path = getattr(section, name)
        if path is not None:
            require_unused([path], f"--{name.replace('_', '-')}", overwrite=section.overwrite)
    if section.output is not None and section.output == section.metadata_output:
        raise ConfigError("`--output` and `--metadata-output` are the same file")


def _counts(section: WeightsSection) -> list[DatasetTokens]:
    from lmcore.data.blend.weights import count_tokens, read_token_counts
    from lmcore.data.tools.merge import find_datasets

    if section.metadata is not None:
        return read_token_counts(section.metadata)
    found = [prefix for directory in section.input for prefix in find_datasets(directory)]
    return count_tokens([*section.datasets, *found])


def _write(path: str, text: str) -> None:
    from lmcore.base.durable import write_atomically
    from lmcore.data.indexed.files import disk_errors

    with disk_errors(Path(path)):
        write_atomically(Path(path), text.encode())
